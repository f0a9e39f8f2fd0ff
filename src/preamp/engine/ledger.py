# SPDX-License-Identifier: BSD-3-Clause
"""What became of the optimizer steps: counted, told, and given up on where scaling cannot go on.

Where the device decides about a step, the host is not made to wait for the answer: it goes into
pinned memory, and is looked at when it has come, or when somebody asks. A step in a CUDA graph is
not counted: its replays obey overflow and adjust the scale, but the host does not learn of them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from threading import RLock

import torch

from preamp.core.errors import LossScaleError
from preamp.core.log import say
from preamp.core.ranks import is_first_rank, name_of_rank
from preamp.core.tensors import host_reaches, is_capturing
from preamp.engine.overflow import GradientNote, OverflowCause, find_cause
from preamp.engine.overflow_messages import check_limits, overflow_message
from preamp.engine.session import OptimizerSession
from preamp.scaling import LossScaler

_CAUSES_KEPT = 256

OnCall = Callable[[OptimizerSession], None]
OnSkip = Callable[[OptimizerSession, OverflowCause], None]
OnStep = Callable[[OptimizerSession, int, bool], None]


class _Flag:
    """``found_inf`` on its way to the host."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._device = found_inf.device
        if found_inf.device.type == "cuda":
            self._value = torch.empty((), dtype=found_inf.dtype, device="cpu", pin_memory=True)
            self._value.copy_(found_inf, non_blocking=True)
            self._event = torch.cuda.Event()
            # Where the copy was queued, which need not be the current device.
            self._event.record(torch.cuda.current_stream(found_inf.device))
        else:
            self._value = found_inf.clone()

    def has_come(self) -> bool:
        if self._event is None:
            return True
        return not is_capturing(self._device) and self._event.query()  # it would end the capture

    def read(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value != 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A step that the host does not know the outcome of yet."""

    session: OptimizerSession
    flag: _Flag | None  # not zero if it was skipped; ``None`` if it was certainly not
    notes: tuple[GradientNote, ...]  # what the backwards before it found
    scales: tuple[Callable[[], float], ...]  # tell the loss scales after it
    was_taken: bool = False  # whatever the flag says, since the loss scale is static


class Ledger:
    """Counts steps and tells of those not taken."""

    def __init__(
        self,
        scalers: Sequence[LossScaler],
        name_of: Callable[[torch.Tensor], str],
        *,
        limit: int | None,
        verbosity: int,
    ) -> None:
        """Start without steps; after ``limit`` skipped ones in a row training stops."""
        # The latest skipped steps with their causes, oldest first; bounded
        self.causes: deque[OverflowCause] = deque(maxlen=_CAUSES_KEPT)
        self.last_skipped = False
        self.is_paused = False  # while torch steps with zeros to make an optimizer's state
        # Held while steps are counted and told; another thread may ask for them
        self.lock = RLock()
        self._scalers = scalers
        self._name_of = name_of
        self._limit = limit
        # 0 tells nothing but what the modules were watched for
        self.verbosity = verbosity
        # Called with the session and the cause of each overflow, also of steps that were taken
        self.on_overflow: list[OnSkip] = []
        # Called with the session of each step that is over, its outcome perhaps not known
        self.on_call: list[OnCall] = []
        # Called with the session and the cause of each skipped step, before `on_step`
        self.on_skip: list[OnSkip] = []
        # Called with the session, the number of the step among its own, counted from 1, and whether
        # it was skipped: once for each step, in order, when its outcome is known
        self.on_step: list[OnStep] = []
        self._open: deque[_Open] = deque()
        self._has_told = False  # of any overflow
        self._has_traced = False  # and to what it was followed
        self._told_stack: list[str] = []  # the calls that were printed last

    def applied(self, session: OptimizerSession) -> None:
        """Count a step that updated the weights, or will in a CUDA graph's replays."""
        if self.is_paused or is_capturing(self._scalers[0].device):
            session.finish_step()
            return
        with self.lock:
            try:
                for tell in tuple(self.on_call):
                    tell(session)
            finally:  # the weights are updated, whatever becomes of a listener
                notes = tuple(session.watched)
                session.finish_step()
                if notes or self._open:
                    self._take(session, notes)
                else:
                    self._count(session, skipped=False)

    def _take(self, session: OptimizerSession, notes: tuple[GradientNote, ...]) -> None:
        """Count a step that was taken once those before it are, and what watchers saw has come."""
        flags = [flag for note in notes for flag in note.found_inf]
        flag = _Flag(functools.reduce(torch.maximum, flags)) if flags else None
        step = _Open(session, flag, notes, (), was_taken=True)
        if self._open or not host_reaches(notes[0].scale):
            self._open.append(step)
        else:
            self._count_taken(step)

    def _count_taken(self, step: _Open) -> None:
        """Count it, and tell of an overflow before it, if there was one."""
        try:
            if step.flag is not None and step.flag.read():
                scales = [scaler.value() for scaler in self._scalers]
                self._tell(step.session, step.notes, scales, was_skipped=False)
        finally:
            self._count(step.session, skipped=False)

    def skipped(self, session: OptimizerSession) -> None:
        """Count a step not taken, tell why; raises `LossScaleError` where scaling cannot go on."""
        with self.lock:
            try:
                for tell in tuple(self.on_call):
                    tell(session)
                self.settle(wait=True)  # the host has waited for this step's outcome anyway
            finally:
                notes = tuple(session.notes)
                scales = [scaler.coming_scale()() for scaler in self._scalers]
                session.finish_step()
                self._skip(session, notes, scales)

    def decided_on_device(self, session: OptimizerSession, found_inf: torch.Tensor) -> None:
        """Take note of a step that the device has taken unless ``found_inf`` is set."""
        if is_capturing(found_inf.device):
            session.finish_step()
            return
        scales = tuple(scaler.coming_scale() for scaler in self._scalers)
        flag, notes = _Flag(found_inf), tuple(session.notes)
        with self.lock:
            self._open.append(_Open(session, flag, notes, scales))
            try:
                for tell in tuple(self.on_call):
                    tell(session)
            finally:
                session.finish_step()

    def latest_taken(self, session: OptimizerSession) -> bool | None:
        """Whether the latest step of an optimizer was taken, ``None`` before the first.

        Synchronises, and raises, as `settle`.
        """
        self.settle(wait=True)
        steps = session.steps_applied + session.steps_skipped
        return session.skips_in_row == 0 if steps else None

    def settle(self, *, wait: bool, gives_up: bool = True) -> None:
        """Count the steps whose outcome is known by now; raises as `skipped`, if it ``gives_up``.

        To ``wait`` for all outcomes synchronises.
        """
        while self._open:  # without a lock: mostly there is nothing to do
            with self.lock:
                flag = self._open[0].flag if self._open else None
                if not self._open or not (wait or flag is None or flag.has_come()):
                    return
                step = self._open.popleft()
                if step.was_taken:
                    self._count_taken(step)
                elif flag is not None and flag.read():
                    scales = [read() for read in step.scales]
                    with nullcontext() if gives_up else suppress(LossScaleError):
                        self._skip(step.session, step.notes, scales)
                else:
                    self._count(step.session, skipped=False)

    def settle_all(self) -> None:
        """Count all steps, give up on none, then raise what a listener raised. Synchronises."""
        first: Exception | None = None
        while self._open:
            try:
                self.settle(wait=True, gives_up=False)
            except Exception as error:  # of one step; the next call goes on behind it
                first = first or error
        if first is not None:
            raise first

    def _skip(
        self, session: OptimizerSession, notes: Sequence[GradientNote], scales: Sequence[float]
    ) -> None:
        try:
            cause = self._tell(session, notes, scales)
        finally:
            self._count(session, skipped=True)
        rule = self._scalers[cause.loss_id].rule
        check_limits(cause, session.skips_in_row, self._limit, rule)

    def _tell(
        self,
        session: OptimizerSession,
        notes: Sequence[GradientNote],
        scales: Sequence[float],
        *,
        was_skipped: bool = True,
    ) -> OverflowCause:
        step = session.steps_applied + session.steps_skipped + 1
        cause = find_cause(notes, step, scales, self._name_of, was_skipped=was_skipped)
        self.causes.append(cause)
        if self._speaks(cause.was_watched) and (was_skipped or not self._has_told):
            self._say(cause)
        self._has_told = True
        for tell in (*self.on_overflow, *(self.on_skip if was_skipped else ())):
            tell(session, cause)
        return cause

    def _say(self, cause: OverflowCause) -> None:
        """Print the cause; on another rank than the first once, if its origin was seen there."""
        # What a rank has made reaches the others by a reduction: it alone has seen where.
        is_first_trace = cause.trace is not None and not self._has_traced
        self._has_traced |= is_first_trace
        # Skipped steps in a row mostly come from one place.
        stack = [] if cause.trace is None else cause.trace.stack
        text = overflow_message(cause, with_stack=stack != self._told_stack)
        self._told_stack = stack or self._told_stack
        say(text if is_first_rank() else f"{name_of_rank()}: {text}", every_rank=is_first_trace)

    def _speaks(self, was_asked: bool) -> bool:
        """Whether a line is printed: what a program has asked for by name is, always."""
        return self.verbosity > 0 or was_asked

    def _count(self, session: OptimizerSession, *, skipped: bool) -> None:
        session.count(skipped=skipped)
        self.last_skipped = skipped
        for tell in tuple(self.on_step):
            tell(session, session.steps_applied + session.steps_skipped, skipped)
