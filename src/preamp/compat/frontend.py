# SPDX-License-Identifier: BSD-3-Clause
"""The functions of ``apex.amp``: preamp's own, for all engines where Apex took no argument."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Literal, cast

import torch

from preamp import engine as rooms
from preamp.compat.amp_state import amp_state
from preamp.compat.handle import AmpHandle
from preamp.compat.stash import attach_stashes
from preamp.compat.wrapper import OptimizerWrapper
from preamp.core.errors import bad_state
from preamp.core.log import say
from preamp.core.pytree import map_leaves
from preamp.policy import APEX_OPTIONS, OPT_LEVELS, Policy, Scope, Storage

_PREFIX = "loss_scaler"


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    scope: Scope | None = None,
    keep_fp32: Any = None,
    storage: str | Storage | None = None,
) -> Any:
    """Put models and optimizers into mixed precision; see `preamp.initialize`.

    Arguments, result and errors are described there. On top of that ``amp.state_dict()``,
    ``amp.load_state_dict()``, ``amp.master_params()`` and ``amp._amp_state`` cover the new engine,
    before those of earlier calls; one without optimizers only where no other has any.
    ``_amp_state.hard_override`` and ``_amp_state.allow_incoming_model_not_fp32`` are honoured. With
    ``verbosity`` above 0 the options are printed line by line. Function casts hold in the whole
    calling thread unless ``scope="model"`` is passed.
    ``patch_torch_functions_type`` is ROCm's argument; keyword-only, since its fork inserted it in
    the middle of the positional ones.

    Raises:
        PreampStateError: Also for an ``FP16_Optimizer``.
    """
    arguments = locals()
    if enabled:
        _refuse_fp16_optimizers(optimizers)
    of_apex: dict[str, object] = {"scope": "thread" if scope is None else scope}
    of_apex["hard_override"] = amp_state.hard_override
    of_apex["allow_half_model"] = amp_state.allow_incoming_model_not_fp32
    engine = rooms.start({**arguments, **of_apex}, _tell)
    _take_note(engine, _number(verbosity))
    return models if optimizers is None else (models, optimizers)


def _tell(policy: Policy, recording: rooms.Recording) -> None:
    """Print the decisions as scripts know Apex to."""
    if recording.verbosity > 0:
        say(f"Selected optimization level {policy.brief}\n")
        say("Defaults for this optimization level are:")
        _say_options(OPT_LEVELS[policy.opt_level])
        say("Processing user overrides (additional kwargs that are not None)...")
        say("After processing overrides, optimization options are:")
        _say_options(policy)


def _say_options(policy: Policy) -> None:
    for name in APEX_OPTIONS:
        say(f"{name:26} : {getattr(policy, name)}")


def _take_note(engine: rooms.Engine, verbosity: int) -> None:
    if engine.policy.enabled:
        attach_stashes(engine)
        if engine.casts_functions:
            # Of the engine's undo alone: the handle does not keep the engine alive.
            amp_state.handle = AmpHandle(engine.cast_undo.unwind)
    engine.on_close(partial(amp_state.closed, weakref.ref(engine)))
    amp_state.made(engine, verbosity)


def _number(verbosity: Any) -> int:
    """``verbosity``, or what it was before: with amp off anything may be passed."""
    try:
        return int(verbosity)
    except (TypeError, ValueError):
        return amp_state.verbosity


def _refuse_fp16_optimizers(optimizers: Any) -> None:
    given = cast("list[Any]", optimizers) if isinstance(optimizers, list) else [optimizers]
    if any(isinstance(optimizer, OptimizerWrapper) for optimizer in given):
        raise bad_state(
            "There is an FP16_Optimizer in optimizers",
            "It keeps masters and a loss scale of its own, and so would amp",
            "Pass the optimizer inside it, or leave amp out",
        )


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[torch.Tensor]:
    """Scale the loss for the backward in the body; see `preamp.scale_loss`.

    Where amp is off the loss itself is yielded. ``model`` is ignored.

    Raises:
        PreampStateError: ``amp.initialize`` was never called, or not for these optimizers.
    """
    if amp_state.is_off:  # anything may be passed then
        given: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        if all(rooms.find_engine(item) is None for item in given):
            yield loss
            return
        optimizers = given
    members = rooms.as_optimizers(optimizers)
    engines = {rooms.find_engine(optimizer) for optimizer in members}
    if engines == {None} and amp_state.engine is None:
        raise bad_state(
            "amp.scale_loss was called before amp.initialize",
            "It takes optimizers that went through amp.initialize",
            "Call model, optimizer = amp.initialize(model, optimizer, opt_level=…) "
            "before the training loop; enabled=False turns amp off",
        )
    if len(engines) > 1 or None in engines:
        rooms.common_engine(members, initialize="amp.initialize")  # raises
    with rooms.scale_loss(
        loss, members, loss_id, model, delay_unscale, delay_overflow_check
    ) as scaled:
        yield scaled


def master_params(optimizer: torch.optim.Optimizer | None = None) -> Iterator[torch.nn.Parameter]:
    """Yield what ``optimizer`` updates; see `preamp.master_params`.

    Args:
        optimizer: Any. ``None`` means all optimizers that ``amp.initialize`` was given, the latest
            call's first, and yields what several of them update once.

    Raises:
        PreampStateError: ``None``, and there is no such optimizer.
    """
    if optimizer is not None:
        return rooms.master_params(optimizer)
    given = [one for engine in amp_state.engines for one in engine.optimizers]
    if not given:
        raise bad_state(
            "amp.master_params was called without an optimizer before amp.initialize",
            "Without one it yields what the optimizers given to amp.initialize update",
            "Pass the optimizer, or call amp.initialize with it first",
        )
    updated = {id(param): param for one in given for param in rooms.master_params(one)}
    return (param for param in updated.values())


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all loss scalers in Apex's format, in ``destination`` if given.

    Those of the latest call of ``amp.initialize`` come first, as many as its ``num_losses``, and
    have the numbers that Apex gave them; those of earlier calls follow.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, …}``, empty where amp is off.
    """
    # Not OrderedDict[str, Any](): that leaves a mark which torch.load(weights_only=True) refuses.
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(amp_state.loss_scalers):
        result[f"{_PREFIX}{index}"] = scaler.core.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Set all loss scalers from Apex's format.

    Entries are matched by the number in their key. As in Apex, entries without a scaler and
    scalers without an entry are told of and left; static scales keep their value. Nothing is told
    where those of earlier calls have no entry, as where the model of an earlier training is still
    there.

    Raises:
        PreampStateError: amp was never initialized and there is something to load, or a key is
            unknown; nothing was applied.
        ValueError: An entry cannot be read; nothing was applied.
    """
    if not state_dict or amp_state.is_off:
        return
    engines = amp_state.engines
    if not engines:
        raise bad_state(
            "amp.load_state_dict was called before amp.initialize",
            "Loss scalers exist from amp.initialize on",
            "Load models and optimizers in any order, but amp's state after amp.initialize",
        )
    unknown = [key for key in state_dict if not _is_scaler_key(key)]
    if unknown:
        raise bad_state(
            f"The state has unknown keys {unknown}",
            f"Allowed are {_PREFIX}0, {_PREFIX}1, …",
            "Pass what amp.state_dict() returned; nothing was loaded",
        )
    entries = {int(key.removeprefix(_PREFIX)): entry for key, entry in state_dict.items()}
    scalers = [scaler for engine in engines for scaler in engine.scalers]
    for index in entries.keys() & set(range(len(scalers))):
        scalers[index].read_state(entries[index])
    if len(state_dict) not in accumulate(len(engine.scalers) for engine in engines):
        say(
            f"Warning: state_dict contains {len(state_dict)} entries, while "
            f"{len(scalers)} loss_scalers are used"
        )
    for index in sorted(set(entries) - set(range(len(scalers)))):
        say(f"Skipping loss_scaler[{index}], since num_losses was set to {len(scalers)}")
    start = 0
    for engine in engines:
        own = {
            f"{_PREFIX}{index}": entries.get(start + index, scaler.state_dict())
            for index, scaler in enumerate(engine.scalers)
        }
        numbers = range(start, start + len(own))
        if entries.keys() & set(numbers):
            engine.load_state_dict(own)
        start = numbers.stop


def _is_scaler_key(key: Any) -> bool:
    return isinstance(key, str) and key.removeprefix(_PREFIX).isdigit() and key.startswith(_PREFIX)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``fn`` applied to every tensor in it.

    Containers keep their type; see `preamp.core.pytree.map_leaves`.
    """
    return map_leaves(fn, value)
