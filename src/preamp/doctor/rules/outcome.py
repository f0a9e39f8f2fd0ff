# SPDX-License-Identifier: BSD-3-Clause
"""PA6xx: runs that have come to nothing, whatever the reason."""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from preamp.core.pytree import tensors_in
from preamp.core.tensors import stored_grad
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import Seen, Source, Streak, largest

NO_STEP = define_rule(
    id="PA601",
    severity=Severity.ERROR,
    title="No step updates the weights",
    why="""A few skipped steps are part of finding the loss scale. If none follows that is applied,
    the loss or the weights are not finite or the scale does not adjust, and the run trains
    nothing.""",
    how="""All steps of an optimizer were skipped, or the last eight or more; or eight backwards
    gave gradients to parameters of optimizers and none was ever stepped. Up to three steps, all
    skipped, are a warning, since the scale may be on its way.""",
    do="""Look at the loss of the step named. If it is finite, start from a smaller scale and see
    that scaler.update() is called; if not, no loss scale can help.""",
)
BAD_WEIGHTS = define_rule(
    id="PA602",
    severity=Severity.ERROR,
    title="Weights are infinite or nan",
    why="""All that is computed from such a weight is infinite or nan, no step brings it back, and
    checkpoints from there on are worthless.""",
    how="""After each step the largest magnitude is taken of what the optimizer updates, and of half
    weights with masters. Reported if it is not finite in the end.""",
    do="""Go back to a checkpoint from before the step named. Make a static loss scale smaller, or
    use a dynamic one, which skips such steps; look at the learning rate, and at PA201.""",
)
BAD_LOSS = define_rule(
    id="PA603",
    severity=Severity.ERROR,
    title="The loss is infinite or nan, and the loop goes on",
    why="""Such a loss has no useful gradient. A dynamic loss scale skips the step, a script that
    looks leaves it out, any other destroys its weights: in no case is there training.""",
    how="""The last three losses of a line, or all, were infinite or nan where a backward began or
    where the script read them; or so were the last three outputs of a model called with gradients
    on. Infinite outputs count if no backward followed.""",
    do="""Stop the loop. Look at the data of that step, at what overflows in half (preamp's
    trace_overflow names it), and at the learning rate.""",
)
NO_GRADIENT = define_rule(
    id="PA604",
    severity=Severity.ERROR,
    title="All gradients are zero",
    why="""float16 has nothing between zero and 6e-8. If all gradients fall in there, no weight
    moves, however good the loss looks.""",
    how="""In an optimizer's last three steps, or in all, every gradient was zero; gradients were
    float16 or had been on their way, and the loss was not zero.""",
    do="Use a dynamic loss scale or a larger static one, or train in bfloat16.",
)

_LAST = 3
_SKIPPED = 8
_SURELY = 4


@dataclass(slots=True)
class _Fate:
    """What became of one optimizer."""

    name: str
    made: Place | None
    applied: int = 0
    skipped: int = 0
    in_row: int = 0  # skipped steps since the last one that was applied
    backwards: int = 0  # that gave its parameters gradients
    weights: Streak = field(default_factory=Streak)
    gradients: Streak = field(default_factory=Streak)
    at: Place | None = None  # the line of its steps


class Outcome(Detector):
    """Finds PA601, PA602 and PA604."""

    RULES = (NO_STEP, BAD_WEIGHTS, NO_GRADIENT)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._fates: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Fate] = (
            weakref.WeakKeyDictionary()
        )
        self._all: list[_Fate] = []
        self._loss: torch.Tensor | None = None

    def _fate(self, optimizer: torch.optim.Optimizer) -> _Fate:
        fate = self._fates.get(optimizer)
        if fate is None:
            fate = _Fate(type(optimizer).__name__, self.seen.facts(optimizer).made)
            self._fates[optimizer] = fate
            self._all.append(fate)
        return fate

    def loss_made(self, loss: torch.Tensor) -> None:
        """Keep the latest one: where it is zero, so are gradients."""
        self._loss = loss.detach()

    def backward_ended(self, source: Source, was_half: Container[int]) -> None:
        """Count what has become of the steps before."""
        for optimizer in tuple(self.seen.optimizers):
            fate = self._fate(optimizer)
            self._count(optimizer, fate)
            if fate.backwards < _SKIPPED and not fate.applied + fate.skipped:
                params = self.seen.params(optimizer)
                marks = (self.seen.gradients.live(param) for param in params)
                fate.backwards += any(m is not None and m.source is source for m in marks)

    def _count(self, optimizer: torch.optim.Optimizer, fate: _Fate) -> None:
        applied, skipped = self.seen.counts(optimizer)
        fate.in_row = skipped - fate.skipped + (fate.in_row if applied == fate.applied else 0)
        if applied != fate.applied and skipped == fate.skipped:
            fate.in_row = 0
        fate.applied, fate.skipped = applied, skipped

    def step_over(self) -> None:
        """Count it now: when the run ends, the optimizer may be gone."""
        for optimizer in tuple(self.seen.optimizers):
            self._count(optimizer, self._fate(optimizer))

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Look whether there is any gradient in it."""
        fate = self._fate(optimizer)
        fate.at = fate.at or current_place()
        params = [p for p in self.seen.params(optimizer) if stored_grad(p) is not None]
        is_half = self.seen.gradients.was_half
        loss = self._loss
        if loss is None or not any(p.dtype is torch.float16 or is_half(p) for p in params):
            return
        size = largest(map(stored_grad, params))
        if size is not None:
            is_zero = (size == 0).logical_and((loss != 0).any().to(size.device))
            fate.gradients.add(is_zero, sum(self.seen.counts(optimizer)) + 1)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the weights."""
        own = [param for group in optimizer.param_groups for param in group["params"]]
        size = largest([*own, *self.seen.params(optimizer)])
        if size is not None:
            steps = sum(self.seen.counts(optimizer))
            self._fate(optimizer).weights.add(size.isfinite().logical_not(), steps)

    def run_ended(self) -> None:
        """Report optimizers that trained nothing, or destroyed what they trained."""
        for optimizer, fate in tuple(self._fates.items()):
            self._count(optimizer, fate)
        for number, fate in enumerate(self._all):
            self._report_skips(number, fate)
            if bad := fate.weights.latest:
                step = fate.weights.began
                what = f"{fate.name}'s weights are not finite since step {step}, for {bad} steps."
                self.report(BAD_WEIGHTS, number, what, where=fate.at, step=step, steps=bad)
            zero = fate.gradients.latest
            if zero and zero >= min(_LAST, fate.gradients.total):
                step = fate.gradients.began
                what = f"All gradients of {fate.name} are zero since step {step}, for {zero} steps."
                self.report(NO_GRADIENT, number, what, where=fate.at, step=step, steps=zero)

    def _report_skips(self, number: int, fate: _Fate) -> None:
        steps = fate.applied + fate.skipped
        is_trained = steps or self.seen.steps or self.seen.compiles
        if fate.backwards >= _SKIPPED and not is_trained:
            what = f"{fate.name} was never stepped, though its parameters got gradients."
            self.report(NO_STEP, number, what, where=fate.made, backwards=fate.backwards)
        if fate.in_row < _SKIPPED and (fate.applied or not fate.skipped):
            return
        first = steps - fate.in_row + 1
        self.report(
            NO_STEP,
            number,
            f"{fate.name} has skipped every step since step {first}: {fate.in_row} of {steps}.",
            where=fate.at or fate.made,
            severity=None if fate.in_row >= _SURELY else Severity.WARNING,
            step=first,
            skipped=fate.in_row,
            steps=steps,
        )


class Losses(Detector):
    """Finds PA603."""

    RULES = (BAD_LOSS,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._losses: dict[Place | None, Streak] = {}
        self._nan: dict[str, Streak] = {}
        self._unused: dict[str, Streak] = {}

    def loss_made(self, loss: torch.Tensor) -> None:
        """Look whether it is finite."""
        self.loss_read(loss)
        for streak in self._unused.values():
            streak.end()

    def loss_read(self, loss: torch.Tensor) -> None:
        """Look at what the script may leave out afterwards."""
        finite = loss.detach().isfinite().all()
        streak = self._losses.setdefault(current_place(), Streak())
        streak.add(finite.logical_not(), self.seen.step())

    def model_called(self, module: nn.Module, output: Any) -> None:
        """Look whether the output is finite; where values are masked they are -inf."""
        floats = [t.detach() for t in tensors_in(output) if t.is_floating_point() and t.numel()]
        if not floats or not any(tensor.requires_grad for tensor in tensors_in(output)):
            return
        name = type(module).__name__
        # A maximum of nan is nan.
        top = torch.stack([t.max().float().to(floats[0].device) for t in floats]).max()
        step = self.seen.step()
        self._nan.setdefault(name, Streak()).add(top.isnan(), step)
        self._unused.setdefault(name, Streak()).add(top.isposinf().logical_or(top.isnan()), step)

    def run_ended(self) -> None:
        """Report what is not finite at the end."""
        for place, streak in self._losses.items():
            self._report("The loss", place, streak)
        for which in (self._nan, self._unused):
            for name, streak in which.items():
                if self.is_new(BAD_LOSS, "loss"):
                    self._report(f"The output of {name}", None, streak)

    def _report(self, what: str, place: Place | None, streak: Streak) -> None:
        count, first = streak.latest, streak.began
        if count and count >= min(_LAST, streak.total):
            text = f"{what} is not finite since step {first}: the last {count} of {streak.total}."
            self.report(BAD_LOSS, "loss", text, where=place, step=first, bad=count)
