# SPDX-License-Identifier: BSD-3-Clause
"""The weights of an engine as others see them: in checkpoints, copies, averages and forwards.

The half weight is the truth, and the master refines it: whoever wants exact values gets the
master's where that rounds to the half weight. Methods of `Engine`, and hooks that find the engine
through a link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from preamp.casting.io import CastInputs
from preamp.casting.modules import Conversion
from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError
from preamp.core.link import ATTRIBUTE, EngineHook, Link
from preamp.core.torch_private.modules import add_hook
from preamp.core.torch_private.operations import unheard
from preamp.core.torch_private.shards import set_data
from preamp.core.undo import UndoStack
from preamp.engine.session import OptimizerSession
from preamp.optim import Twin

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore


def master_of(engine: Callable[[], EngineCore | None], half: torch.Tensor) -> torch.Tensor | None:
    """Return the master of a half weight, if the engine lives and has one."""
    alive = engine()
    twin = None if alive is None else alive.twin_of(half)
    return None if twin is None else twin.master


@contextmanager
def zeros_are_stepped(
    engine: Callable[[], EngineCore | None], optimizer: torch.optim.Optimizer
) -> Generator[None]:
    """Within the block a step is none of the script's: it is not counted, and not warned of."""
    alive = engine()
    if alive is None or id(optimizer) not in alive.sessions:
        yield
        return
    before, alive.has_scaled = alive.has_scaled, True
    alive.ledger.is_paused = True
    try:
        yield
    finally:
        alive.has_scaled = before
        alive.ledger.is_paused = False


def exact_value(self: EngineCore, half: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 value of ``half``, with what was written to it from outside."""
    twin = self.twin_of(half)
    if twin is None:
        return None
    return twin.master if twin.table.is_split and twin.table.gives_masters else twin.value()


def load_exact(self: EngineCore, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of ``half``; return what to round into ``half``.

    That is ``None`` if it has no master, or is its master for now (`exact_weights`), or ``value``
    has another shape.
    """
    twin = self.twin_of(half)
    if twin is None or value.shape != half.shape or self.is_exact:
        return None
    twin.table.set_value(twin.row, value)
    twin.table.trusted.add(twin.row)
    return half.detach().clone()


def trust_masters(self: EngineCore, params: Iterable[torch.Tensor]) -> None:
    """Masters of these ``params`` are equal on all ranks, or were set; none is rounded anew."""
    for param in params:
        twin = self.twin_of(param)
        if twin is not None:
            twin.table.trusted.add(twin.row)


@contextmanager
def exact_weights(self: EngineCore) -> Generator[None]:
    """Within the block the models are float32, and their parameters are the masters.

    For whatever walks over ``model.parameters()`` and should see exact values: an average of
    weights (``AveragedModel.update_parameters``), a target network, merging, an export. What is
    written to the parameters within the block is written to the masters, and rounded into the
    half weights at its end. Half tensors without a master (frozen ones, those of no optimizer,
    buffers) are widened meanwhile, for which there has to be memory, and rounded at the end.
    Gradients are away. A block within a block of the same engine does nothing. At levels without
    masters nothing changes. Does not synchronise, but where masters lie on the host: copies of them
    are on the device meanwhile, 4 bytes for each parameter.

    Raises:
        PreampStateError: Within a ``scale_loss`` block.

    Mutates:
        The models' parameters and buffers, until the end of the block.
    """
    self.check_outside_blocks("exact_weights()")
    if self.is_exact or not self.policy.master_weights:
        yield
        return
    twins = {id(t.half): t for s in self.sessions.values() for t in s.table.twins}
    tables = [session.table for session in self.sessions.values()]
    # Masters on the host come to the device for the block, split ones are joined.
    values = [(t.half, t.value().to(t.half.device)) for t in twins.values()]
    for table in tables:
        table.gradients.take_in()
    models = [model for model in self.models if _leads_to(self, model)]
    rest = [tensor for tensor in _half_tensors(models) if id(tensor) not in twins]
    casts = [(hook, hook.dtype) for model in models for hook in _input_casts(model)]
    away = [(half, half.data, half.grad) for half in (*(half for half, _ in values), *rest)]
    try:
        self.is_exact = True
        for table in tables:
            table.is_exact = True
        for half, value in values:
            half.grad = None
            set_data(half, value)
        for half in rest:
            half.grad = None
            set_data(half, half.data.float())
        for cast, _ in casts:
            cast.dtype = torch.float32
        yield
    finally:
        for cast, dtype in casts:
            cast.dtype = dtype
        written = [(half, half.data) for half, data, _ in away if half.dtype is not data.dtype]
        for half, data, grad in away:
            set_data(half, data)
            half.grad = grad
        for table in tables:
            table.is_exact = False
        self.is_exact = False
        for half, value in written:
            if load_exact(self, half, value) is None:
                half.data.copy_(value)


def _input_casts(model: nn.Module) -> list[CastInputs]:
    hooks = vars(model)["_forward_pre_hooks"].values()
    return [hook for hook in hooks if isinstance(hook, CastInputs)]


def _leads_to(engine: EngineCore, model: nn.Module) -> bool:
    """Whether no later engine has taken ``model`` over."""
    link: Link[EngineCore] | None = vars(model).get(ATTRIBUTE)
    return link is not None and link.target is engine


def _half_tensors(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The half parameters and buffers, each once."""
    found = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    return [*{id(tensor): tensor for tensor in found if is_half(tensor)}.values()]


class FollowMasters(EngineHook):
    """Forward pre-hook: round masters that were written to since the latest step.

    Optimizers that move weights between steps (sharpness-aware, schedule-free, Lookahead) write
    to the masters, some through ``.data``. What is compiled is not looked into: there a forward
    may come too early.
    """

    def __init__(self, link: Link[EngineCore]) -> None:
        """Look for the engine through ``link``; a copied model has none."""
        self.link = link

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Mutates half weights. Does not synchronise."""
        del module, args
        if torch.compiler.is_compiling():
            return
        engine = self.link.target
        with unheard():  # a trace tells what the model does
            for session in () if engine is None else engine.sessions.values():
                session.table.follow()


def attach_weight_doors(model: nn.Module, link: Link[EngineCore], undo: UndoStack) -> None:
    """Hook forwards of ``model``."""
    add_hook(model, "register_forward_pre_hook", FollowMasters(link), undo, prepend=True)


# -- the end: what training has made of models and optimizers -------------------------------------


class WeightsAtEnd:
    """What training has made of models and optimizers, taken stock of before hooks are removed."""

    def __init__(self, sessions: Collection[OptimizerSession], conversion: Conversion) -> None:
        """Note gradients and the exact values of masters."""
        self._sessions = sessions
        self._conversion = conversion
        twins = [twin for session in sessions for twin in session.table.twins]
        self._grads = [(twin.half, _unscaled_gradient(twin)) for twin in twins]
        self._exact = {id(t.half): t.value().to(t.half.device) for t in twins}

    def give_back(self) -> None:
        """Make half parameters float32 again, and move optimizer state back to them.

        May be called again if it was interrupted.
        """
        for session in self._sessions:
            session.release_masters()
        self._conversion.revert(self._exact)
        for half, unscaled in self._grads:
            if unscaled is not None:
                unscaled = unscaled.to(half.device, half.dtype)  # float64 again?
            half.grad = unscaled
        for session in self._sessions:
            session.recast_state()


def _unscaled_gradient(twin: Twin) -> torch.Tensor | None:
    """The master's gradient, or ``None`` also where it cannot be told any more."""
    try:
        return twin.table.gradients.gradient(twin.row)
    except PreampStateError:  # changed in place while it was scaled: the gradient of nothing
        return None
