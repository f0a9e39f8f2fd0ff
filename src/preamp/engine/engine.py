# SPDX-License-Identifier: BSD-3-Clause
"""What one ``initialize`` made: the object that everything about it can be asked of."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import nn

from preamp.core.errors import bad_state
from preamp.core.link import ATTRIBUTE, Link
from preamp.core.undo import UndoStack, run_all, set_attribute
from preamp.engine import watchers
from preamp.engine.core import EngineCore
from preamp.engine.explain import explain_engine
from preamp.engine.overflow import OverflowCause
from preamp.engine.state import load_scalers, scalers_state
from preamp.engine.weights import (
    WeightsAtEnd,
    exact_value,
    exact_weights,
    load_exact,
    trust_masters,
)

if TYPE_CHECKING:
    from preamp.numerics import History


_IN_USE: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()
"""The engines that models or optimizers have. Of the process, since any two may share weights; a
mark on what is shared would enter its copies and pickles."""
_IN_USE_LOCK: Final = threading.Lock()


def engines_in_use() -> list[Engine]:
    """The engines that were made and neither closed nor collected, in no order."""
    with _IN_USE_LOCK:
        return list(_IN_USE)


class Engine(EngineCore):
    """Mixed precision for some models and optimizers.

    Made by ``preamp.initialize``; found again with ``preamp.engine_of``. Any number of engines
    live side by side in a process.

    Attributes:
        link: Leads here until the engine is closed.
        tracer: Watches the modules where that was asked for; set by ``initialize``.
        recorder: Makes the records of `history`; set by ``initialize``.
    """

    link: Link[Engine]
    tracer: watchers.Tracer
    recorder: watchers.Recorder

    # -- what users ask ----------------------------------------------------------------------

    def loss_scale(self, loss_id: int = 0) -> float:
        """Return the loss scale of loss ``loss_id``. Synchronises with its device.

        Raises:
            IndexError: There is no such loss.
        """
        return self.scaler(loss_id).value()

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
    def overflow_causes(self) -> list[OverflowCause]:
        """The causes of the latest 256 skipped steps, oldest first; a new list. May synchronise.

        With a static loss scale these are steps that were taken, while the modules were watched.
        """
        self.ledger.settle(wait=True)
        return list(self.ledger.causes)

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
        go. With a static loss scale the step is taken, and told in the same way. Changes nothing,
        waits for nobody. What is compiled or scripted is not looked into.

        Raises:
            PreampStateError: The engine is closed.
        """
        if self.closed:
            raise bad_state(
                "Engine.trace_overflow was called after Engine.close",
                "The models of a closed engine are nobody's to watch",
                "Call preamp.initialize again, and this on preamp.engine_of(model)",
            )
        if self.policy.enabled:
            backwards = sum(session.backwards for session in self.sessions.values())
            self.tracer.arm(is_first=backwards == 0)

    def explain(self) -> str:
        """Say what was decided, for which reason, and what was found; several lines of text."""
        return explain_engine(self)

    @property
    def verbosity(self) -> int:
        """0, 1 or 2 as in ``preamp.initialize``; can be set."""
        return self.ledger.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self.ledger.verbosity = value

    def master_of(self, half: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 master of the model parameter ``half``, or ``None``."""
        twin = self.twin_of(half)
        return None if twin is None else twin.master

    exact_value, load_exact, exact_weights = exact_value, load_exact, exact_weights
    trust_masters = trust_masters

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and counters as plain data; weights are in the models' own.

        Together with the models' and optimizers' own ``state_dict`` this resumes training bitwise.
        It loads with ``torch.load(weights_only=True)``.
        """
        self.ledger.settle(wait=True)
        return scalers_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``: what `state_dict` returned, or Apex's ``amp.state_dict()``.

        Raises:
            ValueError: Scalers are missing, left over or unreadable; nothing was applied.
        """
        with self.ledger.lock:
            self.ledger.settle(wait=True, gives_up=False)  # else they count on top later
            if load_scalers(self, state):
                self.recorder.resumed()
        self.reductions.compare_again()

    def report(self, path: str | Path, *, title: str = "Training report") -> None:
        """Write what is known of the run so far as one HTML page.

        What is on it follows from `initialize`'s ``numerics`` and ``history``; parts that were not
        recorded name what to switch on. Changes nothing; may synchronise. Open or closed;
        ``preamp report`` does the same for files.

        Args:
            path: The page; replaced as a whole or not at all.
            title: Its heading.

        Raises:
            PreampUnavailableError: jinja2 or matplotlib is missing; the extra ``report`` has both.
            OSError: The page cannot be written.
        """
        from preamp.report import write

        write(Path(path), self.history, title=title)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled, as with an optimizer whose class copies all it has."""
        raise bad_state(
            "An engine was to be copied or pickled, alone or with what leads to it",
            "It belongs to the models and optimizers it was made for, of which torch copies values",
            "Copy the model, build an optimizer for the copy and load optimizer.state_dict()",
        )

    def undo_of(self, model: nn.Module) -> UndoStack:
        """The steps that take back what was done to ``model`` alone."""
        return self._model_undo[id(model)]

    @property
    def own_models(self) -> list[nn.Module]:
        """The models that no later engine has taken over."""
        return [model for model in self.models if id(model) in self._model_undo]

    def be_found_from(self, thing: nn.Module | torch.optim.Optimizer) -> None:
        """Let ``thing`` lead to this engine."""
        with _IN_USE_LOCK:
            _IN_USE.add(self)
        set_attribute(thing, ATTRIBUTE, self.link, self._links[id(thing)])

    def hand_over(self, model: nn.Module) -> None:
        """Let go of ``model``, which another engine has now; the optimizers stay.

        Without any model left nothing is cast for this engine any more. May be called again if it
        was interrupted.
        """
        for stacks in (self._model_undo, self._links):
            if id(model) in stacks:
                stacks[id(model)].unwind()
                stacks.pop(id(model))
        if not self._model_undo and not self.has_masters:
            self.process_undo.unwind()

    def take_back(self) -> tuple[Callable[[], None], ...]:
        """What takes back hooks and patches; a step may run twice."""
        stacks = (self.undo, *self._model_undo.values(), self.process_undo)
        return tuple(stack.unwind for stack in stacks)

    def be_forgotten(self) -> None:
        """Let nothing lead here any more; what was changed has been taken back."""
        for stack in self._links.values():
            stack.unwind()
        with _IN_USE_LOCK:
            _IN_USE.discard(self)
        self.link.cut()
        self._when_dropped.detach()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` first thing in `close`."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Undo everything ``initialize`` did to models, optimizers and torch.

        Half parameters become float32 again with the exact values of their masters; optimizer
        state moves back to them; gradients left scaled are unscaled; hooks, patches and casts are
        removed. A second call does nothing.

        An interrupt leaves the rest to the next call.

        Raises:
            Exception: The first that a listener or the disk raised; all else was undone.
        """
        if self._end is None:
            try:
                open_ends = [session.end_left_open for session in self.sessions.values()]
                run_all((*open_ends, self.ledger.settle_all, *self._on_close))
            finally:
                self._end = self._make_end()
                self._end.unwind()
        else:
            self._end.unwind()

    def _make_end(self) -> UndoStack:
        weights = WeightsAtEnd(self.sessions.values(), self.conversion)
        end = UndoStack()
        for step in (
            self.be_forgotten,
            weights.give_back,  # also if a hook cannot be removed
            self.recorder.close,
            self.tracer.disarm,
            *reversed(self.take_back()),
            partial(setattr, self, "closed", True),
        ):
            end.push(step)
        return end
