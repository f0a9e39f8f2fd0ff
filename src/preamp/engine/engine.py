# SPDX-License-Identifier: BSD-3-Clause
"""What one ``initialize`` made: the object that everything about it can be asked of."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from preamp.casting import PATCH_LOCK, settle_thread
from preamp.casting.modules import Conversion
from preamp.core.errors import PreampStateError, message
from preamp.core.link import Link
from preamp.core.undo import UndoStack, run_all
from preamp.engine import refusals
from preamp.engine.events import Events
from preamp.engine.joint_findings import Means
from preamp.engine.ledger import Ledger
from preamp.engine.names import ParameterNames
from preamp.engine.order import BackwardOrder
from preamp.engine.overflow import OverflowCause
from preamp.engine.params import first_device, twin_of
from preamp.engine.parts import explain_engine, make_recorder, make_tracer, write_report
from preamp.engine.recording import Recording
from preamp.engine.reductions import Reductions
from preamp.engine.session import OptimizerSession, make_sessions
from preamp.engine.sharding import Unreduced
from preamp.engine.state import load_scalers, make_scaler, scalers_state
from preamp.engine.teardown import weights_given_back
from preamp.engine.weights import exact_value, exact_weights, load_exact, trust_masters
from preamp.optim import LARC
from preamp.policy import Policy
from preamp.scaling import LossScaler
from preamp.scaling.scaler import Adjustments

if TYPE_CHECKING:
    from preamp.numerics import History


ATTRIBUTE = "_preamp_link"
"""Name of the attribute that holds the link, on models and optimizers."""

_WRAPPED_IN = ("module", "_orig_mod")  # DistributedDataParallel and DataParallel; torch.compile


class Engine:
    """Mixed precision for some models and optimizers.

    Made by ``preamp.initialize``; found again with ``preamp.engine_of``. Any number of engines
    live side by side in a process.

    Attributes:
        policy: The frozen decisions.
        models: The models, as given.
        optimizers: The optimizers, as given.
        scalers: One `LossScaler` per loss.
        ledger: What became of the optimizer steps.
        adjustments: When loss scales react.
        order: In which order backwards make gradients.
        events: Whom to tell what happens.
        tracer: Watches the modules where that was asked for.
        recorder: Makes the records of `history`.
        device: Where loss scales and flags live: that of the first parameter.
        closed: Whether `close` was called.
        casts_functions: Whether functions are cast one by one (O1, O4).
        cast_undo: Ends these casts; scaling goes on.
    """

    def __init__(
        self,
        policy: Policy,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        means: Means,
        *,
        num_losses: int,
        recording: Recording,
    ) -> None:
        """Collect the parts; ``initialize`` does the converting and hooking."""
        self.policy = policy
        self.models = tuple(models)
        self.reductions = Reductions(self.models, means.splits)
        self.optimizers = tuple(optimizers)
        self.names = ParameterNames(self.models, self.optimizers)
        self.casts_functions = policy.enabled and policy.patch_torch_functions
        self.closed = False
        self.link: Link[Engine] = Link(self)
        self.undo = UndoStack()
        self._model_undo = {id(model): UndoStack() for model in self.models}
        # Casts of torch's functions outlive nobody: an engine that is dropped without close()
        # takes them back when it is collected. The stack must not refer to the engine.
        self.process_undo = UndoStack()
        # The part of it that ends function casts, for those who stop these and nothing else.
        self.cast_undo = UndoStack()
        self.process_undo.push(self.cast_undo.unwind)
        self._when_dropped = weakref.finalize(
            self, PATCH_LOCK.run_or_leave, self.process_undo.unwind
        )
        self._when_dropped.atexit = False
        self.conversion = Conversion()
        self.ops = ops = means.ops
        self.device = first_device(self.models, self.optimizers)
        self.scalers = [make_scaler(policy, self.device) for _ in range(num_losses)]
        self.order = BackwardOrder()
        limit, told, names = policy.max_consecutive_skips, recording.verbosity, self.names.of
        self.ledger = Ledger(self.scalers, names, limit=limit, verbosity=told, order=self.order)
        self.events = Events()
        self.tracer = make_tracer(self.models, self.events)
        self.ledger.on_skip.append(self.tracer.told)
        self.sessions = make_sessions(
            self.optimizers, ops, self.names.of, self.reductions, has_masters=policy.master_weights
        )
        self.unreduced = Unreduced(self.models, self.optimizers, self.reductions)
        self.recorder = make_recorder(self, recording)
        self._on_close: list[Callable[[], None]] = []
        self._has_scaled = False
        self.adjustments = Adjustments()

    # -- what users ask ----------------------------------------------------------------------

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the loss scale of loss ``loss_id``. Synchronises with its device.

        Raises:
            IndexError: There is no such loss.
        """
        return self.scaler(loss_id).value()

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of loss ``loss_id``.

        Raises:
            IndexError: There is no such loss.
        """
        if 0 <= loss_id < len(self.scalers):
            return self.scalers[loss_id]
        raise refusals.no_such_loss(loss_id, len(self.scalers))

    @property
    def steps_applied(self) -> int:
        """Optimizer steps that updated the weights, over all optimizers. May synchronise."""
        self.ledger.settle(wait=True)
        return sum(session.steps_applied for session in self.sessions.values())

    @property
    def steps_skipped(self) -> int:
        """Optimizer steps not taken because of overflow, over all optimizers. May synchronise."""
        self.ledger.settle(wait=True)
        return sum(session.steps_skipped for session in self.sessions.values())

    @property
    def last_step_skipped(self) -> bool:
        """Whether the latest ``step`` of any optimizer was skipped. May synchronise."""
        self.ledger.settle(wait=True)
        return self.ledger.last_skipped

    @property
    def overflow_causes(self) -> deque[OverflowCause]:
        """The latest skipped steps with their causes, oldest first; bounded. May synchronise."""
        self.ledger.settle(wait=True)
        return self.ledger.causes.copy()

    @property
    def history(self) -> History:
        """The records of the run, also after `close` and on other threads. May synchronise."""
        self.ledger.settle(wait=True)
        self.recorder.flush(wait=True)
        return self.recorder.history

    def trace_overflow(self) -> None:
        """Watch the modules of the models until an overflow, and tell the first to go wrong.

        From the next forward on, hooks read what goes in and out of all modules. The first to
        turn finite values into others is its skipped step's `OverflowCause.trace`; then the hooks
        go. Changes nothing, waits for nobody. What is compiled or scripted is not looked into.

        Raises:
            PreampStateError: No loss has a dynamic scale, so overflows are not looked for.
        """
        if self.policy.enabled:
            refusals.check_can_trace(self.scalers)
            self.tracer.arm()

    def explain(self) -> str:
        """Say what was decided, for which reason, and what was found; several lines of text."""
        return explain_engine(self)

    @property
    def verbosity(self) -> int:
        """0 prints nothing, 1 also each skipped step, 2 also each cast."""
        return self.ledger.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self.ledger.verbosity = value

    @property
    def scales_losses(self) -> bool:
        """Whether any loss has a scale other than the static 1."""
        return not all(scaler.is_identity for scaler in self.scalers)

    def updated_params(self) -> frozenset[int]:
        """``id`` of everything that an optimizer of the engine updates."""
        return frozenset(
            id(param) for session in self.sessions.values() for param in session.gradients.params()
        )

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has a float32 master."""
        return any(session.masters for session in self.sessions.values())

    def master_of(self, half: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 master of the model parameter ``half``, or ``None``."""
        twin = twin_of(half, self.sessions.values())
        return None if twin is None else twin.master

    exact_value, load_exact, exact_weights = exact_value, load_exact, exact_weights
    trust_masters = trust_masters

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and counters as plain data; weights are in the models' own."""
        self.ledger.settle(wait=True)
        return scalers_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or Apex's ``amp.state_dict()``.

        Raises:
            ValueError: Scalers are missing, left over or unreadable; nothing was applied.
        """
        with self.ledger.lock:
            self.ledger.settle(wait=True, gives_up=False)  # else they count on top later
            if load_scalers(self, state):
                self.recorder.resumed()
        for session in self.sessions.values():
            session.compare_weights()

    report = write_report

    def undo_of(self, model: nn.Module) -> UndoStack:
        """The steps that take back what was done to ``model`` alone."""
        return self._model_undo[id(model)]

    def hand_over(self, model: nn.Module) -> None:
        """Let go of ``model``, which another engine has now; the optimizers stay.

        Without any model left nothing is cast for this engine any more.
        """
        self._model_undo.pop(id(model), UndoStack()).unwind()
        if not self._model_undo and not self.has_masters:
            self.process_undo.unwind()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` first thing in `close`."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Undo everything ``initialize`` did to models, optimizers and torch.

        Half parameters become float32 again with the exact values of their masters; optimizer
        state moves back to them; gradients left scaled are unscaled; hooks, patches and casts are
        removed. A second call does nothing.

        Raises:
            Exception: The first that a listener or the disk raised; all else was undone.
        """
        settle_thread()
        if self.closed:
            return
        try:
            run_all((self.ledger.settle_all, *self._on_close))
        finally:
            with weights_given_back(self.sessions.values(), self.conversion, self.adjustments):
                self.closed = True
                self._when_dropped.detach()
                stacks = (self.undo, *self._model_undo.values(), self.process_undo)
                ends = (self.tracer.disarm, self.link.cut, self.recorder.close)
                run_all((*(stack.unwind for stack in stacks), *ends))

    # -- what blocks and hooks report (engine-internal) --------------------------------------

    def _end_step(self, session: OptimizerSession) -> None:
        self.adjustments.catch_up(session)
        for tell in self.events.step_over:
            tell(session)

    def applied_step(self, session: OptimizerSession) -> None:
        """Take note of a step that updated the weights."""
        is_dynamic = any([scaler.is_dynamic for scaler in self.scalers])
        if is_dynamic and not self._has_scaled and session.gradients.holds_raw():
            self._has_scaled = True  # or has been told once
            warnings.warn(refusals.never_scaled(), stacklevel=2)
        self._end_step(session)
        self.ledger.applied(session)

    def block_begins(self) -> None:
        """Take note of a ``scale_loss`` block."""
        self._has_scaled = True

    def skip_step(self, session: OptimizerSession) -> OverflowCause:
        """Take note of a step not taken; see `Ledger.skipped`."""
        self._end_step(session)
        return self.ledger.skipped(session)

    def settle_steps(self) -> None:
        """Count steps of that kind whose outcome is known by now."""
        self.ledger.settle(wait=False)

    def step_decided_on_device(self, session: OptimizerSession, found_inf: torch.Tensor) -> None:
        """Take note of a step whose outcome the host does not know yet."""
        self._end_step(session)
        self.ledger.decided_on_device(session, found_inf)


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a `LARC`; anything else as it is."""
    return optimizer.optim if isinstance(optimizer, LARC) else optimizer


def find_engine(thing: Any) -> Engine | None:
    """Return the open engine of a model or optimizer, or ``None``.

    A model wrapped in DistributedDataParallel, DataParallel or ``torch.compile`` is looked into,
    and so is `LARC`.
    """
    thing = bare(thing)
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    if isinstance(own.get(ATTRIBUTE), Link):
        target = cast("Link[object]", own[ATTRIBUTE]).target
        if isinstance(target, Engine):
            return target
    modules: dict[str, Any] = own.get("_modules", {})
    for name in _WRAPPED_IN:
        if modules.get(name) is not None:
            return find_engine(modules[name])
    return None


def engine_of(thing: Any) -> Engine:
    """Return the engine that ``preamp.initialize`` made for a model or an optimizer.

    Args:
        thing: A model or optimizer given to ``initialize``; wrappers are looked through.

    Raises:
        PreampStateError: It has none: it never had, or its engine was closed.
    """
    engine = find_engine(thing)
    if engine is None:
        raise PreampStateError(
            message(
                f"This {type(thing).__name__} has no engine",
                "Models and optimizers have one from preamp.initialize until Engine.close",
                "Pass it to preamp.initialize first, and keep the same object",
            )
        )
    return engine
