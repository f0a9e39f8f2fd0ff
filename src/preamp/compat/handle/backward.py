# SPDX-License-Identifier: BSD-3-Clause
"""One scaled backward of an optimizer that has no engine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch

from preamp.compat.sessions import session_of
from preamp.compat.wrapper import OptimizerWrapper
from preamp.core.errors import bad_state, bad_type, with_article
from preamp.core.log import say
from preamp.core.undo import Step, UndoStack, all_or_nothing, set_attribute
from preamp.engine.block import check_loss, unscale
from preamp.engine.lookup import find_engine
from preamp.engine.optimizer_hooks import excuse_scheduler
from preamp.engine.overflow import GradientNote
from preamp.engine.session import Plan
from preamp.scaling import LossScaler


def check_owner(optimizer: Any) -> None:
    """Refuse what a handle cannot scale for."""
    if not hasattr(optimizer, "param_groups"):
        raise bad_type(
            f"scale_loss of a handle got {with_article(type(optimizer).__name__)} for an optimizer",
            "It takes the one optimizer whose parameters get gradient",
            "For several optimizers use amp.initialize and amp.scale_loss",
        )
    if isinstance(optimizer, OptimizerWrapper):
        raise bad_state(
            "A handle was given an FP16_Optimizer",
            "Handles scale for optimizers that do not scale by themselves",
            "Call optimizer.backward(loss) instead of scale_loss, or leave FP16_Optimizer out",
        )
    if find_engine(optimizer) is not None:
        raise bad_state(
            f"A handle was given {with_article(type(optimizer).__name__)} that amp.initialize "
            "took over",
            "Handles scale for optimizers that amp.initialize has not seen",
            "Use amp.scale_loss(loss, optimizer) without amp.init, or amp.init alone",
        )


@contextmanager
def scaled_backward(
    loss: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: LossScaler
) -> Generator[tuple[torch.Tensor, Callable[[], bool]]]:
    """Scale ``loss``; after the block unscale the gradients, add the earlier ones and adjust.

    If the body raises, the gradients from before are restored and the scale stays.

    Yields:
        The scaled loss, and a function that after the block tells whether a gradient overflowed.

    Raises:
        PreampStateError: ``optimizer`` scales by itself, or belongs to an engine that does.
        TypeError: ``loss`` is not a floating-point tensor, or ``optimizer`` no optimizer.

    Mutates:
        Gradients and ``scaler``. Synchronises when the result is asked for.
    """
    check_loss(loss)
    check_owner(optimizer)
    session = session_of(optimizer)
    note = GradientNote(0, loss_finite=torch.ones(()), scale=scaler.scale.clone())
    overflow = torch.zeros((), device=scaler.device)

    def prepare() -> list[Step]:
        session.end_body()
        steps, found_inf = unscale([session], scaler, note)
        if found_inf is not None:
            scaler.record(found_inf)
            steps.append(partial(overflow.copy_, found_inf))
        return [*steps, scaler.reaction()]

    try:
        session.begin_backward(Plan(scaler), set())
        scaled = scaler.scale_loss(loss)
        with _warning(loss, scaled):
            yield scaled, lambda: bool(overflow.item())
    except BaseException:
        session.undo()
        raise
    all_or_nothing(prepare, session.undo)


@contextmanager
def _warning(loss: torch.Tensor, scaled: torch.Tensor) -> Generator[None]:
    """Warn when ``backward`` is called on the loss that carries no scale."""
    if scaled is loss:
        yield
        return
    own = cast("dict[str, object]", vars(loss))

    def backward(*args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "backward() was called on the unscaled loss inside a scale_loss block; its gradients "
            "will be divided by the loss scale. Call it on what scale_loss yields.",
            stacklevel=2,
        )
        cast("Any", torch.Tensor).backward(loss, *args, **kwargs)

    own["backward"] = backward
    try:
        yield
    finally:
        own.pop("backward", None)


def skip_next_step(optimizer: torch.optim.Optimizer) -> None:
    """Let the next call of ``optimizer.step`` do nothing. Mutates ``optimizer``."""
    inner: Callable[..., Any] = optimizer.step
    # A scheduler that wraps the method copies its attributes, so the mark is shared, not a value.
    pending: list[bool] = getattr(inner, "preamp_skip", [])
    if any(pending):
        return
    pending = [True]
    undo = UndoStack()

    @functools.wraps(inner)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not pending[0]:  # wrapped by a scheduler, this method stays
            return inner(*args, **kwargs)
        pending[0] = False
        undo.unwind()
        excuse_scheduler(optimizer, inner)
        say("Gradient overflow, skipping update")
        return None

    cast("Any", step).preamp_skip = pending
    # A method, since schedulers take ``optimizer.step.__func__``.
    set_attribute(optimizer, "step", MethodType(step, optimizer), undo)
