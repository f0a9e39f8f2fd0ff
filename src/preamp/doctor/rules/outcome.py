# SPDX-License-Identifier: BSD-3-Clause
"""PA6xx: runs that have come to nothing, whatever the reason."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from preamp.core.pytree import tensors_in
from preamp.core.tensors import stored_grad
from preamp.core.torch_private.autograd import has_hooks, reached_from
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, current_places, define_rule
from preamp.doctor.seen import Moment, OptimizerFacts, Seen, Source, Streak, largest

NO_STEP = define_rule(
    id="PA601",
    severity=Severity.ERROR,
    title="Most steps update no weights, or all",
    why="""A few skipped steps are part of finding the loss scale. If none follows that is applied,
    the loss or the weights are not finite or the scale does not adjust, and the run trains
    nothing.""",
    how="""All steps of an optimizer were skipped, or the last eight or more. If there were up to
    three in all, it is a warning, since the scale may be on its way. So are eight or more, and more
    than were applied, that were skipped after the first that was applied. Or there was no step at
    all after eight backwards in training mode, and the script did not look at the gradients either.
    Or there was none after eight calls of optimizer.zero_grad, or of a model in training mode,
    without a backward. Or the last eight calls of the model, of backward or of step raised errors
    that the script went on from. Those of the model count in lines that have trained, or where none
    ever went well.""",
    do="""Look at the loss of the step named. If it is finite, start from a smaller scale and see
    that scaler.update() is called; if not, no loss scale can help. Where errors are caught, print
    them.""",
)
BAD_WEIGHTS = define_rule(
    id="PA602",
    severity=Severity.ERROR,
    title="Weights or running averages are infinite or nan",
    why="""All that is computed from them is infinite or nan, no step brings them back, and
    checkpoints from there on are worthless. Running averages are destroyed by a single batch, even
    if its step is skipped, and show in the evaluation only.""",
    how="""After each step the largest magnitude is taken of what the optimizer updates and has had
    a gradient. So it is of half weights with masters, and of the running means and variances of the
    model. Reported if it is not finite in the end, no later optimizer has taken over, and no copy
    of the model was evaluated in its place. Left out is a trial that was given up. Another training
    then went well, whose optimizer was built by the same lines, or which came later, when these
    weights were gone.""",
    do="""Go back to a checkpoint from before the step named. Make a static loss scale smaller, or
    use a dynamic one, which skips such steps; look at the learning rate, and at PA201.""",
)
BAD_LOSS = define_rule(
    id="PA603",
    severity=Severity.ERROR,
    title="The loss is infinite or nan, and the loop goes on",
    why="""Such a loss has no useful gradient. A dynamic loss scale skips the step, a script that
    looks leaves it out, any other destroys its weights: in no case is there training.""",
    how="""The last three losses of a line, or all, were infinite or nan where a backward began. Or
    they were zero and computed from such a value, or from outputs that are nan throughout. Values
    that the script reads, and outputs of a model, count too where no backward followed. They do if
    a backward had followed earlier ones, or none ever did, since metrics may be nan. Left out is
    what ended in weights restored, or in a trial that was given up as in PA602, and what began
    after a step that PA602 names.""",
    do="""Stop the loop. Look at the data of that step, at what overflows in half (preamp's
    trace_overflow names it), and at the learning rate.""",
)

_LAST = 3
_SKIPPED = 8
_SURELY = 4
_OUTPUTS = 8
_AWAITED = 8  # values of one line whose graph is kept until a backward begins

_Refs = list[weakref.ref[torch.Tensor]]


@dataclass(slots=True, eq=False)
class _Training:
    """What became of one optimizer and its weights."""

    facts: OptimizerFacts
    # How many steps all optimizers together had taken before its first one, and before its last.
    first: int = -1
    last: int = -1
    applied: int = 0
    skipped: int = 0
    in_row: int = 0  # skipped steps since the last one that was applied
    sought: int = 0  # skipped steps before the first one that was applied
    backwards: int = 0  # that gave its parameters gradients
    # Weights and running averages, as long as the script has them.
    tensors: _Refs = field(default_factory=_Refs)
    weights: int = 0  # as many of them come first
    untrained: _Refs = field(default_factory=_Refs)  # parameters that have never had a gradient
    state: Streak = field(default_factory=Streak)  # of all of them
    at: Place | None = None  # the line of its steps

    def count(self, applied: int, skipped: int) -> None:
        """Take over how many steps were applied and skipped so far."""
        self.sought = self.sought if self.applied else skipped
        self.in_row = skipped - self.skipped + (self.in_row if applied == self.applied else 0)
        self.applied, self.skipped = applied, skipped

    def look_again(self, moment: Moment | None = None) -> None:
        """See what was restored, or destroyed, since the latest step, or at a moment after it."""
        alive = [tensor for ref in self.tensors if (tensor := ref()) is not None]
        size = largest(alive) if len(alive) == len(self.tensors) else None
        if size is not None and moment is not None:
            self.state.add(size.isfinite().logical_not(), moment)
        elif size is not None:
            self.state.correct(size.isfinite().logical_not())

    def is_given_up_for(self, module: nn.Module) -> bool:
        """Whether weights are bad here, and good in a module that is another one with the same.

        Synchronises.
        """
        refs = (*self.tensors, *self.untrained)
        own = [tensor for ref in refs if isinstance(tensor := ref(), nn.Parameter)]
        others = list(module.parameters())
        is_copy = sorted(p.shape for p in own) == sorted(p.shape for p in others)
        if not is_copy or not {*map(id, own)}.isdisjoint(map(id, others)):
            return False
        mine, theirs = largest(own), largest(others)
        return mine is not None and theirs is not None and bool(theirs.isfinite() > mine.isfinite())

    @property
    def bad_part(self) -> str:
        """What of it is not finite. Synchronises."""
        alive = [tensor for ref in self.tensors[: self.weights] if (tensor := ref()) is not None]
        size, name = largest(alive), self.facts.name
        if size is None and self.weights < len(self.tensors):
            return f"{name}'s weights, or running averages of its model,"
        is_finite = size is not None and bool(size.isfinite())
        return f"Running averages of {name}'s model" if is_finite else f"{name}'s weights"

    @property
    def is_gone(self) -> bool:
        """Whether the script has thrown the weights away."""
        return all(ref() is None for ref in self.tensors)

    @property
    def is_well(self) -> bool:
        """Whether it has come to something. Synchronises."""
        return self.applied > 0 and not self.state.latest and self.in_row < _SKIPPED

    def shares(self, other: _Training) -> bool:
        """Whether both have a tensor in common."""
        return not {*map(id, self.tensors)}.isdisjoint(map(id, other.tensors))


class Outcome(Detector):
    """Finds PA601 to PA603."""

    RULES = (NO_STEP, BAD_WEIGHTS, BAD_LOSS)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._trainings: dict[OptimizerFacts, _Training] = {}
        self._all = self._trainings.values()
        self._losses = _Losses(seen)
        self._forwards = 0  # in training mode
        # Calls that raised, since the latest step: of backward and step, and of models by line.
        self._failed = 0
        self._refused: Counter[Place | None] = Counter()
        self._failed_at: Place | None = None
        # The line of each model's latest call, and those that a backward has followed.
        self._called = weakref.WeakKeyDictionary[nn.Module, Place | None]()
        self._trained: set[Place | None] = set()
        self._has_called = False
        self._lost = math.inf  # how many steps were taken when weights ceased to be finite

    def _training(self, optimizer: torch.optim.Optimizer) -> _Training:
        facts = self.seen.facts(optimizer)
        return self._trainings.setdefault(facts, _Training(facts))

    # -- losses ------------------------------------------------------------------------------

    def loss_read(self, loss: torch.Tensor) -> None:
        """Keep it until a backward begins from it, or none does."""
        self._losses.read(loss)

    def loss_made(self, loss: torch.Tensor) -> None:
        """Look whether it is finite."""
        if not loss.is_meta:  # which has no value
            self._losses.begin(loss)

    def backward_ended(self, source: Source, reached: Container[int]) -> None:
        """Count those of parameters that are never stepped."""
        self._trained.update(self._called.values())
        self._see_steps()
        is_training = any(root.training for root in tuple(self.seen.roots))
        for optimizer in tuple(self.seen.optimizers):
            training = self._training(optimizer)
            if is_training and training.backwards < _SKIPPED and not self.seen.steps:
                params = (p for p in self.seen.params(optimizer) if id(p) in reached)
                training.backwards += not all(map(has_hooks, params))

    def model_called(self, module: nn.Module, output: Any) -> None:
        """Look at what the loss will be computed from."""
        place = self._called[module] = current_place()
        self._refused.pop(place, None)
        self._has_called = True
        if module.training:
            self._losses.call(module, output)
            self._forwards += any(tensor.requires_grad for tensor in tensors_in(output))

    # -- steps -------------------------------------------------------------------------------

    def script_failed(self) -> None:
        """Count it, unless a step follows."""
        self._see_steps()
        self._failed += 1
        self._failed_at = current_place()

    def model_failed(self) -> None:
        """Count it, unless a step follows, or a call in the same line goes well."""
        self._see_steps()
        self._failed_at = current_place()
        self._refused[self._failed_at] += 1

    def _see_steps(self) -> None:
        """Count steps, those too that an engine has skipped, of which no event tells."""
        for optimizer in tuple(self.seen.optimizers):
            training = self._training(optimizer)
            applied, skipped = training.applied, training.skipped
            training.count(*self.seen.counts(optimizer))
            if training.skipped > skipped:  # running averages know of no skips
                training.look_again((training.applied + training.skipped, self.seen.steps))
            if training.applied > applied or training.skipped > skipped:
                self._forget_errors()

    def _forget_errors(self) -> None:
        self._failed = 0
        self._refused.clear()

    def step_over(self) -> None:
        """Count it now: when the run ends, the optimizer may be gone."""
        self._forget_errors()
        self._see_steps()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note when and where it is."""
        training = self._training(optimizer)
        training.at = training.at or current_place()
        training.last = self.seen.steps
        training.first = training.last if training.first < 0 else training.first

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the weights."""
        own = [param for group in optimizer.param_groups for param in group["params"]]
        params = {id(param): param for param in (*own, *self.seen.params(optimizer))}
        weights = [param for param in params.values() if self._is_trained(param)]
        trained = {*map(id, weights)}
        tensors = [*weights, *_averages(tuple(self.seen.roots), params)]
        size, training = largest(tensors), self._training(optimizer)
        training.tensors, training.weights = [*map(weakref.ref, tensors)], len(weights)
        training.untrained = [weakref.ref(p) for key, p in params.items() if key not in trained]
        self._losses.forget()
        if size is not None:
            step = sum(self.seen.counts(optimizer))
            training.state.add(size.isfinite().logical_not(), (step, self.seen.steps))

    def _is_trained(self, param: torch.Tensor) -> bool:
        """Whether it has had a gradient: what has none may be a mask, infinite by design."""
        if stored_grad(param) is not None:
            return True
        # One that takes a dead one's ``id`` has its mark as well, and may be a mask.
        return param.requires_grad and self.seen.gradients.last(param) is not None

    # -- what the script puts right, and what is left in the end ------------------------------

    def weights_loaded(self, module: nn.Module) -> None:
        """Forget what came to nothing with the weights that were there before."""
        loaded = {*map(id, map(weakref.ref, module.parameters()))}
        for training in self._all:
            if training.applied and not loaded.isdisjoint(map(id, training.tensors)):
                training.in_row = 0
                self._losses.restore()
        self._look_again(filter(_is_bad, self._all))

    def model_evaluated(self, module: nn.Module) -> None:
        """Look at weights that were bad: restored by hand, or given up for those of a copy."""
        self._look_again(filter(_is_bad, self._all))
        for training in filter(_is_bad, self._all):
            if training.is_given_up_for(module):
                training.tensors.clear()
                training.state.end()
                self._losses.restore()

    def saved(self, content: object) -> None:
        """Look once more."""
        self._look_again(filter(_is_bad, self._all))

    def _look_again(self, trainings: Iterable[_Training]) -> None:
        for training in trainings:
            was_bad = training.state.latest
            training.look_again()
            if was_bad and not training.state.latest:
                self._losses.restore()

    def run_ended(self) -> None:
        """Report trainings that came to nothing, or destroyed what they trained."""
        self._see_steps()
        self._failed += sum(facts.is_inside for facts in tuple(self.seen.optimizers.values()))
        self._look_again(self._all)
        given_up = [training for training in self._all if self._is_given_up(training)]
        for training in self._all:
            if training not in given_up:
                self._report(training)
        if not self._report_losses(given_up):  # which would be the reason
            self._report_no_backward()
        self._report_no_step()
        self._losses.forget()

    def _is_given_up(self, training: _Training) -> bool:
        """Whether it was one of several trials, and another one went well."""
        return any(
            other.is_well and not other.shares(training)
            for other in self._all
            if other is not training and training.first >= 0
            if (other.first > training.last and training.is_gone)
            or (
                other.facts.lines == training.facts.lines
                and (other.first > training.last or 0 <= other.last < training.first)
            )
        )

    def _report(self, training: _Training) -> None:
        self._report_skips(training)
        later = (other for other in self._all if other.first > training.last)
        bad = training.state.latest
        if bad and not any(other.shares(training) for other in later):
            step, taken = training.state.began
            part = training.bad_part
            if "averages" not in part:
                self._lost = min(self._lost, taken)
            what = f"{part} are not finite since step {step}, for {bad} steps."
            self.report(BAD_WEIGHTS, training, what, where=training.at, step=step, steps=bad)

    def _report_skips(self, training: _Training) -> None:
        steps, name = training.applied + training.skipped, training.facts.name
        if training.in_row < _SKIPPED and (training.applied or not training.skipped):
            lost = training.skipped - training.sought
            if lost >= _SKIPPED and lost > training.applied:
                what = f"{name} has skipped {lost} of {steps - training.sought} steps "
                what += f"since the first that was applied, step {training.sought + 1}."
                self.report(NO_STEP, training, what, where=training.at, skipped=lost, steps=steps)
            return
        first = steps - training.in_row + 1
        self.report(
            NO_STEP,
            training,
            f"{name} has skipped every step since step {first}: {training.in_row} of {steps}.",
            where=training.at or training.facts.made,
            severity=None if training.in_row >= _SURELY else Severity.WARNING,
            step=first,
            skipped=training.in_row,
            steps=steps,
        )

    def _report_no_step(self) -> None:
        """Report scripts that take no step, or none any more, for other reasons than a skip."""
        # Which inputs a model takes is tried in lines that train nothing.
        refused = self._refused.items()
        failed = self._failed + sum(
            count for line, count in refused if line in self._trained or not self._has_called
        )
        if failed >= _SKIPPED:
            what = f"The last {failed} calls of a model, of backward or of step raised errors"
            what = f"{what} that the script went on from."
            do = "Print the errors that are caught, and let the first one end the run."
            self.report(NO_STEP, "errors", what, where=self._failed_at, do=do, errors=failed)
        if self.seen.steps or self.seen.compiles:
            return
        for training in self._all:
            if training.backwards >= _SKIPPED and not self.seen.reads_gradients:
                name, made, backwards = training.facts.name, training.facts.made, training.backwards
                what = f"{name} was never stepped, though its parameters got gradients."
                do = f"Call {name}.step(), or scaler.step(optimizer), after the backward."
                self.report(NO_STEP, training, what, where=made, do=do, backwards=backwards)

    def _report_no_backward(self) -> None:
        counts = {"zero_grad was": self.seen.zeroed, "A model in training was": self._forwards}
        what, count = max(counts.items(), key=lambda item: item[1])
        has_trained = self.seen.steps or self._losses.backwards or self.seen.compiles
        if self.seen.has_optimizers and count >= _SKIPPED and not has_trained:
            what = f"{what} called {count} times, and there was no backward."
            do = "Call backward on the loss, and then the optimizer's step."
            self.report(NO_STEP, "backward", what, where=None, do=do, calls=count)

    def _report_losses(self, given_up: list[_Training]) -> bool:
        """Report one at most, and tell whether there was one."""
        for value in self._losses.suspects():
            count, streak = value.streak.latest, value.streak
            if not count or count < min(_LAST, streak.total) or streak.is_mended:
                continue
            step, taken = streak.began
            if taken > self._lost:
                continue  # which follows from the weights
            if any(training.first <= taken <= training.last + 1 for training in given_up):
                continue
            last = f"the last {count} of {streak.total}"
            what = f"{value.name} is not finite since step {step}: {last}."
            self.report(BAD_LOSS, "loss", what, where=value.where, step=step, bad=count)
            return True
        return False


def _is_bad(training: _Training) -> bool:
    return training.state.latest > 0


def _averages(roots: tuple[nn.Module, ...], params: Container[int]) -> Iterator[torch.Tensor]:
    """The running averages of the models that have any of ``params``; extremes begin infinite."""
    for root in roots:
        if any(id(param) in params for param in root.parameters()):
            for name, buffer in root.named_buffers():
                if name.rpartition(".")[2] in ("running_mean", "running_var"):
                    yield buffer


@dataclass(slots=True, eq=False)
class _Value:
    """What a line of the script, or a model, computes again and again."""

    name: str
    where: Place | None = None
    is_loss: bool = False  # whether a backward has begun from it
    streak: Streak = field(default_factory=Streak)
    # The latest, until a backward begins from one: their nodes, and whether a loss is then bad.
    pending: dict[Node, torch.Tensor] = field(default_factory=dict[Node, torch.Tensor])


class _Losses:
    """Losses, and what they are computed from."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._values: dict[object, _Value] = {}
        self.backwards = 0

    def begin(self, loss: torch.Tensor) -> None:
        """A backward begins from it, or is about to."""
        self.backwards += 1
        is_bad = loss.detach().isfinite().all().logical_not()
        pending = {node: value for value in self._values.values() for node in value.pending}
        for node in reached_from(loss, pending) if pending else ():
            value = pending[node]
            # Of several terms one may be nan, and rightly left out.
            is_lost = value.pending.pop(node).to(is_bad.device) & (loss.detach() == 0).all()
            is_bad = is_bad | is_lost
            value.is_loss = True
            value.streak.end()
        place = current_place()
        value = self._values.setdefault(place, _Value("The loss", place, is_loss=True))
        value.streak.add(is_bad, self._seen.now())

    def read(self, loss: torch.Tensor) -> None:
        """The script reads a scalar, which may be a loss, or no more than a metric."""
        lines, is_bad = current_places(), loss.detach().isfinite().logical_not().reshape(())
        value = _Value("The loss", lines[0] if lines else None)
        self._await(self._values.setdefault(lines, value), loss, is_bad, is_bad)

    def call(self, module: nn.Module, output: Any) -> None:
        """A model has made an output; where values are masked it is -inf, or nan in places."""
        name = type(module).__name__
        for number, tensor in enumerate(islice(tensors_in(output), _OUTPUTS)):
            if tensor.is_floating_point() and tensor.numel():
                values = tensor.detach()
                top = values.max()  # nan if any value is
                value = self._values.setdefault((name, number), _Value(f"The output of {name}"))
                is_bad = top.isnan() | top.isposinf()
                self._await(value, tensor, is_bad, values.isnan().all())

    def _await(
        self, value: _Value, tensor: torch.Tensor, is_bad: torch.Tensor, is_lost: torch.Tensor
    ) -> None:
        if tensor.grad_fn is not None and not tensor.is_meta:
            value.streak.add(is_bad, self._seen.now())
            value.pending[tensor.grad_fn] = is_lost
            if len(value.pending) > _AWAITED:
                del value.pending[next(iter(value.pending))]

    def forget(self) -> None:
        """Keep no graph any more."""
        for value in self._values.values():
            value.pending.clear()

    def restore(self) -> None:
        """The script has put back weights from before."""
        for value in self._values.values():
            value.streak.restore()

    def suspects(self) -> list[_Value]:
        """What a backward began from, first of all; all values if there was none."""
        found = [value for value in self._values.values() if value.is_loss or not self.backwards]
        return sorted(found, key=lambda value: value.where is None)
