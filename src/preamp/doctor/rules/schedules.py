# SPDX-License-Identifier: BSD-3-Clause
"""PA104: the learning-rate schedule and skipped steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from preamp.doctor.detector import Detector, Findings
from preamp.doctor.places import current_place
from preamp.doctor.rule import Place, Rule, Severity
from preamp.doctor.seen import Seen
from preamp.engine import find_engine

SCHEDULED_SKIP = Rule(
    id="PA104",
    severity=Severity.WARNING,
    title="The learning-rate schedule advances on skipped steps",
    why=(
        "After an overflow the optimizer's step is left out, and the first steps of a dynamic loss "
        "scale often are. A schedule that goes on all the same runs ahead of the training: warm-up "
        "ends too early, and its first, smallest rates are never used."
    ),
    how=(
        "scheduler.step was called when since its last call the optimizer had skipped steps and "
        "applied none. Steps that an FP16_Optimizer leaves out are not seen."
    ),
    do=(
        "Step the schedule only if the optimizer stepped. With torch.amp the scale has shrunk "
        "after a skip: compare scaler.get_scale() before and after scaler.update(). With preamp "
        "call preamp.step_scheduler(scheduler, optimizer)."
    ),
)


@dataclass(slots=True)
class _Schedule:
    name: str
    counted: tuple[int, int]
    calls: int = 0
    after_skips: int = 0
    where: Place | None = None


class Scheduling(Detector):
    """Finds PA104."""

    RULES = (SCHEDULED_SKIP,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        """Start without schedules."""
        super().__init__(seen, findings)
        self._known: weakref.WeakKeyDictionary[Any, _Schedule] = weakref.WeakKeyDictionary()
        self._schedules: list[_Schedule] = []

    def schedule_stepped(self, scheduler: Any) -> None:
        """Compare the steps since the last call with what became of them."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        counts = self._counts(optimizer)
        schedule = self._known.get(scheduler)
        if schedule is None:  # its constructor, which sets the first learning rate
            schedule = _Schedule(type(scheduler).__name__, counts)
            self._known[scheduler] = schedule
            self._schedules.append(schedule)
            return
        applied, skipped = counts
        before_applied, before_skipped = schedule.counted
        schedule.counted = applied, skipped
        schedule.calls += 1
        if skipped > before_skipped and applied == before_applied:
            schedule.after_skips += 1
            schedule.where = schedule.where or current_place()

    def _counts(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        engine = find_engine(optimizer)
        session = None if engine is None else engine.sessions.get(id(optimizer))
        if session is not None:
            return session.steps_applied, session.steps_skipped
        facts = self.seen.facts(optimizer)
        return facts.applied, facts.skipped

    def run_ended(self) -> None:
        """Report every schedule that ran ahead."""
        for schedule in self._schedules:
            if schedule.after_skips:
                self.report(
                    SCHEDULED_SKIP,
                    schedule.where,
                    f"{schedule.name}.step was called {schedule.calls} times, "
                    f"{schedule.after_skips} of them after a step that was skipped.",
                    where=schedule.where,
                    calls=schedule.calls,
                    after_skipped_steps=schedule.after_skips,
                )
