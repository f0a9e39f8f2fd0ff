# SPDX-License-Identifier: BSD-3-Clause
"""The weights of an engine as others see them: in checkpoints, copies, averages and forwards.

Wherever somebody can see a half weight it is its rounded master, and whoever wants exact values
gets the master's. Methods of `Engine`, and hooks that find the engine through a link.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from preamp.casting.io import CastInputs, remove_forward
from preamp.casting.modules import Conversion
from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError
from preamp.core.link import EngineHook, Link
from preamp.core.tensors import stored_grad
from preamp.core.undo import UndoStack
from preamp.engine.params import twin_of
from preamp.engine.session import OptimizerSession
from preamp.kernels.modules import add_hook, before_moves, forget_moves, remove_hooks
from preamp.kernels.shards import set_data
from preamp.optim import Twin
from preamp.scaling.scaler import Adjustments

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore


def master_of(engine: Callable[[], EngineCore | None], half: torch.Tensor) -> torch.Tensor | None:
    """Return the master of a half weight, if the engine lives and has one."""
    alive = engine()
    twin = None if alive is None else twin_of(half, alive.sessions.values())
    return None if twin is None else twin.master


@contextmanager
def zeros_are_stepped(
    engine: Callable[[], EngineCore | None], optimizer: torch.optim.Optimizer
) -> Generator[None]:
    """Within the block a step without ``scale_loss`` is no mistake of the script."""
    alive = engine()
    if alive is None or id(optimizer) not in alive.sessions:
        yield
        return
    before, alive.has_scaled = alive.has_scaled, True
    try:
        yield
    finally:
        alive.has_scaled = before


def exact_value(self: EngineCore, half: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 value of ``half``, with what was written to it from outside.

    Raises `PreampStateError` where this rank has a part of it only; see `Holding.value`.
    """
    twin = twin_of(half, self.sessions.values())
    if twin is None:
        return None
    if half.dtype is not torch.float32:  # not inside `exact_weights`
        twin.settle()
    return twin.value()


def load_exact(self: EngineCore, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of ``half``, or this rank's part of it; return what to round into ``half``.

    That is ``None`` if it has no master, or ``value`` another shape.
    """
    twin = twin_of(half, self.sessions.values())
    if twin is None or value.shape != half.shape:
        return None
    with torch.no_grad():
        twin.master.copy_(twin.held.own(value))
    twin.table.expect_load(twin.row)
    whole = twin.master.detach() if twin.held.part is None else value.float()
    return twin.table.rounded(twin.row, whole)


def trust_masters(self: EngineCore, params: Iterable[torch.Tensor]) -> None:
    """Masters of these ``params`` are equal on all ranks, or were set; none is rounded anew."""
    for param in params:
        twin = twin_of(param, self.sessions.values())
        if twin is not None:
            twin.table.loaded.add(twin.row)


@contextmanager
def exact_weights(self: EngineCore) -> Generator[None]:
    """Within the block the models' parameters are the float32 masters.

    For whatever walks over ``model.parameters()`` and should see exact values: an average of
    weights (``AveragedModel.update_parameters``), a target network, merging, an export. What is
    written to the parameters within the block is written to the masters, and rounded into the
    half weights at its end. Parameters without a master stay as they are. Gradients are away
    meanwhile. Does not synchronise.

    Raises:
        PreampStateError: Within a ``scale_loss`` block, or where ranks share masters.

    Mutates:
        The models' parameters, until the end of the block.
    """
    self.check_outside_blocks("exact_weights()")
    twins = {id(t.half): t for s in self.sessions.values() for t in s.masters or ()}.values()
    for twin in twins:
        twin.table.make()
    values = [(twin, twin.held.value()) for twin in twins]  # refuses parts
    tables = {id(twin.table): twin.table for twin in twins}.values()
    for twin in twins:
        twin.settle()
    for table in tables:
        table.reconcile()
    casts = [
        hook
        for model in self.models
        for hook in vars(model)["_forward_pre_hooks"].values()
        if isinstance(hook, CastInputs)
    ]
    away = [(twin.half, twin.half.data, twin.half.grad) for twin in twins]
    try:
        for twin, value in values:
            twin.half.grad = None
            set_data(twin.half, value.data)
        for cast in casts:
            cast.is_on = not twins
        yield
    finally:
        for cast in casts:
            cast.is_on = True
        for half, data, grad in away:
            set_data(half, data)
            half.grad = grad
        for table in tables:
            table.write_halves()
        trust_masters(self, [twin.half for twin in twins])


class FollowMasters(EngineHook):
    """Forward pre-hook: round masters that were written to since the latest step.

    Optimizers that move weights between steps (sharpness-aware, schedule-free, Lookahead) write
    to the masters. What is compiled is not looked into: there a forward may come too early.
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
        for session in () if engine is None else engine.sessions.values():
            for table in session.gradients.tables:
                table.follow_masters()


class CopyExact:
    """``__deepcopy__`` of a half module, for averages: exact float32, no engine or gradients."""

    def __init__(self, link: Link[EngineCore], module: nn.Module) -> None:
        """Copy ``module`` with the weights of the engine behind ``link``."""
        self._link = link
        self._module = Link(module)

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Return the copy; see `copy.deepcopy`."""
        module, engine = self._module.target, self._link.target
        if module is None:
            raise PreampStateError("the module of a copied method was copied")
        own = [part for part in module.modules() if "__deepcopy__" in vars(part)]
        methods = [vars(part).pop("__deepcopy__") for part in own]
        try:
            if engine is not None:
                _exact_copies(engine, module, memo)
            made = copy.deepcopy(module, memo)
        finally:
            for part, method in zip(own, methods, strict=True):
                vars(part)["__deepcopy__"] = method
        if engine is not None:
            for part in made.modules():
                remove_hooks(part, lambda hook: isinstance(hook, EngineHook))
                remove_forward(part)
                forget_moves(part)
        return made


def _exact_copies(engine: EngineCore, module: nn.Module, memo: dict[int, Any]) -> None:
    """Let ``copy.deepcopy`` find float32 copies of the half tensors of ``module``."""
    dtypes = engine.conversion.dtypes()
    for param in module.parameters():
        if is_half(param) and id(param) not in memo:
            exact = exact_value(engine, param)
            value = param.detach() if exact is None else exact.detach()
            wide = value.to(dtypes.get(id(param), param.dtype), copy=True)
            memo[id(param)] = nn.Parameter(wide, param.requires_grad)
    for buffer in module.buffers():
        if is_half(buffer) and id(buffer) not in memo:
            memo[id(buffer)] = buffer.detach().to(dtypes.get(id(buffer), buffer.dtype), copy=True)


def attach_weight_doors(model: nn.Module, link: Link[EngineCore], undo: UndoStack) -> None:
    """Hook forwards and copies of ``model``."""
    add_hook(model, "register_forward_pre_hook", FollowMasters(link), undo, prepend=True)
    for part in model.modules():
        method = CopyExact(link, part)
        undo.push(partial(_remove_copy_method, part, method))
        vars(part)["__deepcopy__"] = method


def attach_move_doors(model: nn.Module, link: Link[EngineCore], undo: UndoStack) -> None:
    """Let masters be float32 while modules of ``model`` are moved, as by ``model.cpu()``.

    What is only moved is not taken for written to then.
    """

    def prepare() -> None:
        engine = link.target
        for session in () if engine is None else engine.sessions.values():
            for table in session.gradients.tables:
                table.make()

    for part in model.modules():
        before_moves(part, prepare, undo)


def _remove_copy_method(part: nn.Module, method: CopyExact) -> None:
    if vars(part).get("__deepcopy__") is method:  # not one of a later engine
        del vars(part)["__deepcopy__"]


# -- the end: what training has made of models and optimizers -------------------------------------


class WeightsAtEnd:
    """What training has made of models and optimizers, taken stock of before hooks are removed."""

    def __init__(
        self,
        sessions: Collection[OptimizerSession],
        conversion: Conversion,
        adjustments: Adjustments,
    ) -> None:
        """Unscale gradients left scaled, and note gradients and the exact values of masters."""
        self._sessions = sessions
        self._conversion = conversion
        claimed: set[int] = set()
        for session in sessions:
            session.settle_now(claimed, adjustments)
        twins = [twin for session in sessions for twin in session.masters or ()]
        self._grads = [(twin.half, _unscaled_gradient(twin)) for twin in twins]
        for twin in twins:
            if twin.half.dtype is not torch.float32:  # not after model.float()
                twin.settle()
        self._exact = {id(twin.half): twin.master.data for twin in twins}

    def give_back(self) -> None:
        """Make half parameters float32 again, and move optimizer state back to them.

        May be called again if it was interrupted.
        """
        for session in self._sessions:
            session.release_masters()
        self._conversion.revert(self._exact)
        for half, unscaled in self._grads:
            half.grad = None if unscaled is None else unscaled.to(half.dtype)  # float64 again?
        for session in self._sessions:
            session.recast_state()


def _unscaled_gradient(twin: Twin) -> torch.Tensor | None:
    """The master's gradient, or ``None`` also where it cannot be told any more."""
    try:
        pending = twin.pending
        if pending is None or twin.held.part is not None or stored_grad(twin.master) is not None:
            return twin.gradient()
        # Noted nowhere, so that it is found again if `Engine.close` is interrupted.
        grad, factor = pending
        return twin.table.ops.widen_add([grad], [factor], [None])[0]
    except PreampStateError:  # changed in place while it was scaled: the gradient of nothing
        return None
