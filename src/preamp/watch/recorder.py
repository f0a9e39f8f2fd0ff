# SPDX-License-Identifier: BSD-3-Clause
"""Turning what happens in an engine into the records of its history.

A step's numbers are put aside when ``optimizer.step`` is called, and become records when its
outcome is known and they have reached the host. Nobody is made to wait for either.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial
from typing import cast

import torch
from torch.nn.parameter import is_lazy

from preamp.core.dtypes import dtype_name
from preamp.core.ranks import is_first_rank
from preamp.core.tensors import is_capturing
from preamp.core.undo import run_all
from preamp.core.version import __version__
from preamp.engine.core import EngineCore
from preamp.engine.events import Backward
from preamp.engine.overflow import GradientNote, OverflowCause
from preamp.engine.recording import Recording
from preamp.engine.session import OptimizerSession
from preamp.numerics import History, ResumeRecord, RunRecord
from preamp.watch.host_copies import HostCopies
from preamp.watch.meter import Meter
from preamp.watch.steps import FinishedCall, PendingStep, Statistics, Steps


class Recorder:
    """Listens to an engine and adds records to its history."""

    def __init__(self, engine: EngineCore, recording: Recording) -> None:
        """Open the history, and subscribe to what is needed for the records that are made.

        Of several processes the first one writes the file; the others keep their records in memory.
        `History` raises where that cannot be, somebody else writes to it, or it holds something
        else.
        """
        ledger, events, scalers = engine.ledger, engine.events, engine.scalers
        self._lock = ledger.lock  # other threads may ask for records
        # Without losses (``num_losses=0``) there is nothing that a graph could hold.
        self._device = scalers[0].device if scalers else torch.device("cpu")
        self.history = History(recording.path if is_first_rank() else None)
        self.recording = recording
        self._meter = Meter(engine.names, engine.policy.half_dtype)
        self._scalers = scalers
        self._optimizers = {
            id(session): Steps(index, session)
            for index, session in enumerate(engine.sessions.values())
        }
        self._waiting: deque[tuple[Steps, FinishedCall]] = deque()
        self._follows_a_run = False
        ledger.on_overflow.append(self.overflow_told)
        if recording.takes_steps:
            events.block_begins.append(lambda backward: self.forget_dropped(backward.sessions))
            events.gradients_made.append(self.gradients_made)
            events.norm_taken.append(self.norm_taken)
            events.update_begins.append(self.update_begins)
            events.gradients_dropped.append(self.gradients_dropped)
            ledger.on_call.append(self.step_called)
            ledger.on_step.append(self.step_settled)

    @property
    def _takes_steps(self) -> bool:
        """What goes into a CUDA graph is left out: its replays tell the host nothing."""
        return self.recording.takes_steps and not is_capturing(self._device)

    @property
    def _measures(self) -> bool:
        return self.recording.numerics != "off" and not is_capturing(self._device)

    # -- what the engine reports -------------------------------------------------------------

    def start(self, engine: EngineCore) -> None:
        """The run of ``engine`` begins, or goes on with the file of an earlier one."""
        self._follows_a_run = len(self.history) > 0
        self.history.add(run_record(engine))

    def resumed(self) -> None:
        """Make records on their way: the counters were set to a checkpoint's. Synchronises."""
        with self._lock:
            try:
                self.flush(wait=True)
            finally:
                self._follows_a_run = False
                self._waiting.clear()
                for optimizer in self._optimizers.values():
                    optimizer.called.clear()
                    optimizer.pending = PendingStep()
                self.history.add(self._position())

    def gradients_dropped(self, session: OptimizerSession) -> None:
        """The script has zeroed its gradients: they are no step's."""
        self._optimizers[id(session)].pending = PendingStep()

    def forget_dropped(self, sessions: Iterable[OptimizerSession]) -> None:
        """Forget backwards whose gradients the script has dropped one by one."""
        for session in sessions:
            pending = self._optimizers[id(session)].pending
            if pending.has_gradients and not session.holds_raw():
                self.gradients_dropped(session)

    def gradients_made(self, backward: Backward) -> None:
        """A backward has ended, its gradients still scaled. Does not synchronise."""
        self.measure(backward.sessions, backward.note)
        if not self._takes_steps:
            return
        value = backward.loss.detach()
        value = value if value.dtype is torch.float64 else value.float()
        value = value.mean() if value.dim() else value.clone()
        for session in backward.sessions:
            pending = self._optimizers[id(session)].pending
            pending.losses[backward.note.loss_id] = value
            pending.norm = None  # of the gradients before this backward
            pending.has_gradients = session.holds_raw()

    def measure(self, sessions: Iterable[OptimizerSession], note: GradientNote) -> None:
        """A backward has left scaled gradients; a loss's last one counts. Does not synchronise."""
        if not self._measures:
            return
        for session in sessions:
            optimizer = self._optimizers[id(session)]
            if self.recording.measures(self._next_number(optimizer)):
                copies = HostCopies()
                readings = self._meter.gradients(session, copies, note.scale)
                statistics = Statistics(note.loss_id, readings, copies)
                optimizer.pending.statistics[note.loss_id] = statistics

    def norm_taken(self, session: OptimizerSession, norm: torch.Tensor) -> None:
        """The unscaled gradients have this norm. Does not synchronise."""
        if self._takes_steps:
            self.forget_dropped((session,))
            self._optimizers[id(session)].pending.norm = norm.detach().clone()

    def update_begins(self, session: OptimizerSession, has_closure: bool) -> None:
        """The weights are about to change. Does not synchronise."""
        if not self._measures or has_closure:
            return
        self.forget_dropped((session,))
        optimizer = self._optimizers[id(session)]
        number = self._next_number(optimizer)
        if not self.recording.measures(number):
            return
        if not optimizer.pending.statistics:  # no scale_loss
            copies = HostCopies()
            readings = self._meter.stepped_gradients(session, copies)
            optimizer.pending.statistics[0] = Statistics(0, readings, copies)
        if self.recording.numerics == "full":
            optimizer.pending.before = self._meter.before(session)

    def step_called(self, session: OptimizerSession) -> None:
        """``optimizer.step`` is over, its outcome perhaps not known. Does not synchronise."""
        if not self._takes_steps:
            return
        self._place()
        optimizer = self._optimizers[id(session)]
        number, pending, optimizer.pending = optimizer.next_number, optimizer.pending, PendingStep()
        is_full = self.recording.numerics == "full" and self.recording.measures(number)
        if is_full:
            taken = next(iter(pending.statistics.values()), None)
            if taken is None:
                taken = pending.statistics[0] = Statistics(0, [])
            taken.readings.extend(self._meter.weights(session, taken.copies, pending.before))
        step = pending.call(session.optimizer, self._scalers)
        optimizer.called.append(step)
        self._waiting.append((optimizer, step))
        self.flush(late=(number - 1) % self.recording.every == 0)

    def overflow_told(self, session: OptimizerSession, cause: OverflowCause) -> None:
        """It is known what overflowed before a step, which was mostly not taken."""
        self._place()
        optimizer = self._optimizers[id(session)]
        self.history.add(dataclasses.replace(cause.to_record(), optimizer=optimizer.index))

    def step_settled(self, session: OptimizerSession, number: int, is_skipped: bool) -> None:
        """It is known what became of a step."""
        optimizer = self._optimizers[id(session)]
        if optimizer.called:
            step = optimizer.called.popleft()
            step.number, step.is_skipped = number, is_skipped
            self.flush()

    # -- records -----------------------------------------------------------------------------

    def flush(self, *, wait: bool = False, late: bool = False) -> None:
        """Make the records that can be made, in order.

        To ``wait`` for their numbers synchronises. ``late`` ones are of devices that cannot tell
        whether they have come.
        """
        full = self.recording.numerics == "full"
        failure: Exception | None = None
        with self._lock:
            while self._waiting:
                optimizer, step = self._waiting[0]
                if step.is_skipped is None or not (wait or step.have_come(late=late)):
                    break
                self._waiting.popleft()
                for record in step.records(optimizer.index, with_histograms=full):
                    try:
                        self.history.add(record)
                    except Exception as error:
                        failure = failure or error  # the other records are not to be lost
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Make all records and close the history, whatever fails; then raise the first error."""
        run_all((partial(self.flush, wait=True), self.history.close))

    def _next_number(self, optimizer: Steps) -> int:
        with self._lock:  # another thread may be in the middle of counting
            return optimizer.next_number

    def _place(self) -> None:
        """Void what the file has of later steps, where training begins before them again."""
        if self._follows_a_run:
            self._follows_a_run = False
            position = self._position()
            if any(map(position.voids, self.history)):
                self.history.add(position)

    def _position(self) -> ResumeRecord:
        steps = [optimizer.settled for optimizer in self._optimizers.values()]
        return ResumeRecord(step=max(steps, default=0), steps=steps)


def run_record(engine: EngineCore) -> RunRecord:
    """Say what the run is: the decisions, the parameters, the machine."""
    params = {engine.names.of(p): p for model in engine.models for p in model.parameters()}
    on_gpu = engine.device.type == "cuda"
    policy = {f.name: getattr(engine.policy, f.name) for f in dataclasses.fields(engine.policy)}
    return RunRecord(
        preamp=__version__,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(engine.device) if on_gpu else engine.device.type,
        opt_level=engine.policy.opt_level,
        policy={name: str(value).removeprefix("torch.") for name, value in policy.items()},
        parameters={name: 0 if is_lazy(p) else p.numel() for name, p in params.items()},
        dtypes={name: dtype_name(param.dtype) for name, param in params.items()},
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        optimizers=[_options_of(session.optimizer) for session in engine.sessions.values()],
    )


def _options_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    groups: list[dict[str, object]] = optimizer.param_groups
    plain = {
        option: str(cast("object", value))
        for option, value in (groups[0].items() if groups else ())
        if isinstance(value, (str, bool, int, float, tuple))
    }
    return {"class": type(optimizer).__name__, **plain}
