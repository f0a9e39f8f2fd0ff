# SPDX-License-Identifier: BSD-3-Clause
"""PA4xx: what the optimizer updates is not what the model has."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from preamp.core.tensors import stored_grad
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import OptimizerFacts, Origin, Seen, largest, sample_of
from preamp.engine import find_engine

MISSING = define_rule(
    id="PA401",
    severity=Severity.WARNING,
    title="Trainable parameters are in no optimizer",
    why="""They keep their initial values, while their gradients are computed, stored and summed up
    step after step, and under a GradScaler never unscaled or checked for overflow.""",
    how="""A model that the script calls has parameters with requires_grad that no optimizer was
    given, while others of the same model are in one. Without a gradient it is an info, since the
    parameter may be unused. A model none of whose parameters is in an optimizer is taken for one
    that is not to be trained, or has copies of them trained.""",
    do="""Pass them to the optimizer (add_param_group for layers made later), or say that they stay
    as they are: requires_grad_(False).""",
)
REPLACED = define_rule(
    id="PA402",
    severity=Severity.ERROR,
    title="The optimizer updates parameters that the model no longer has",
    why="""The optimizer was built first, and then the model's parameters were replaced. A copy of
    the model, a new layer, a parametrization, or a conversion that makes new Parameter objects does
    so. Its steps change tensors that nobody reads, and the model does not learn.""",
    how="""In its first steps the optimizer has parameters that never have a gradient and belong to
    no model that was called. The model has as many trainable ones of the same shapes, with
    gradients, that are in no optimizer.""",
    do="Build the optimizer after the model has its final device, dtype and layers.",
)

DROPPED = define_rule(
    id="PA403",
    severity=Severity.ERROR,
    title="Gradients are dropped between backward and step",
    why="""The step finds no gradients, or zeros. Nothing is learned, while momentum and weight
    decay go on moving the weights. Where gradients are accumulated, and set to zero for each batch,
    nothing is learned from any but the last.""",
    how="""A backward gave gradients to the optimizer's parameters, or to half ones that it has
    copies of. In most steps all were gone or zero when the step began. Or before most steps as many
    backwards of the same line, for other batches, had their gradients set to zero, while no weight
    was changed.""",
    do="Call zero_grad before the first backward of a step, or after the step.",
)
NEVER_ZEROED = define_rule(
    id="PA404",
    severity=Severity.ERROR,
    title="Gradients are never set to zero",
    why="""backward adds to what is there. Without zero_grad each step gets the sum of all gradients
    so far, most of them of weights of long ago.""",
    how="""In three steps or more, and in most, gradients or a part of them still contained what the
    step before had used, which was not zero.""",
    do="Call optimizer.zero_grad() once for each step, of the optimizer that has all parameters.",
)
NOT_COPIED = define_rule(
    id="PA405",
    severity=Severity.ERROR,
    title="Masters are never copied back to the model",
    why="""The optimizer updates float32 copies of half weights. If they are not copied back after
    the step, the model computes with its first weights for ever.""",
    how="""An optimizer's parameters have the shapes, or the number of elements, of half parameters
    that are in no optimizer. In steps 2, 4, 8 and so on the half ones have not moved in any bit,
    and are not the rounded values of the copies. Or the copies have been set back to them.""",
    do="After the step call p.copy_(master) under torch.no_grad(), or let preamp's O2 do it.",
)
NOT_DIVIDED = define_rule(
    id="PA406",
    severity=Severity.INFO,
    title="Accumulated losses are added up, not averaged",
    why="""The sum of the gradients of k batches is k times that of one large batch. The learning
    rate is k times what it seems, and overflow is nearer.""",
    how="""In most steps the gradients are sums of several backwards of one line, each with a
    forward of its own. Each loss is a mean, and neither losses nor gradients were divided.""",
    do="Divide the loss by the number of backwards, or the gradients once before the step.",
)

FROZEN_MOVE = define_rule(
    id="PA408",
    severity=Severity.WARNING,
    title="Frozen weights are moved by the optimizer",
    why="""An optimizer leaves out parameters without a gradient, not those whose gradient is zero.
    Weight decay shrinks them in every step, though nothing trains them, and momentum carries them
    on.""",
    how="""Looked at in the first 32 steps and then at powers of two. A parameter whose gradient the
    script had set to zero after the backward, or that has one and does not require it, was changed
    by two steps. Parameters with masters are not looked at.""",
    do="""Set their gradients to None (zero_grad does by default), or leave them out of the
    optimizer.""",
)

_STEPS = 3
_NAMED = 3
_EARLY = 32


@dataclass(frozen=True, slots=True)
class _Missing:
    """A parameter that is in no optimizer."""

    name: str
    key: int
    elements: int


class Membership(Detector):
    """Finds PA401 and PA402."""

    RULES = (MISSING, REPLACED)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._got_gradient: set[int] = set()
        self._replaced: set[int] = set()
        # What was in an optimizer once counts: wrappers put float32 copies in its place.
        self._owned: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lacks: dict[int, tuple[str, list[_Missing], Place | None]] = {}

    def group_added(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what it was given."""
        self._owned.update((id(p), weakref.ref(p)) for p in self.seen.params(optimizer))

    def _is_owned(self, param: torch.Tensor) -> bool:
        """Whether an optimizer has had it, and not one that is gone and had its ``id``."""
        known = self._owned.get(id(param))
        return known is not None and known() is param

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Look before the first step: a ``GradScaler`` refuses one without gradients."""
        if self.seen.facts(optimizer).begun == 0:
            self._check_replaced(optimizer, self._missing())

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters have a gradient, at the first few and some later steps."""
        begun = self.seen.facts(optimizer).begun
        if begun > _STEPS and begun & (begun - 1):
            return
        missing = self._missing()
        self._got_gradient |= {id(p) for p in missing if stored_grad(p) is not None}
        self._note_partly_owned()
        if begun in (1, _STEPS):
            self._check_replaced(optimizer, missing)

    def _note_owned(self) -> None:
        for optimizer in tuple(self.seen.optimizers):
            self.group_added(optimizer)

    def _trainable(self) -> dict[int, torch.Tensor]:
        """Those of all models that were called, by ``id``."""
        params = (param for root in tuple(self.seen.roots) for param in root.parameters())
        return {id(param): param for param in params if param.requires_grad}

    def _missing(self) -> list[torch.Tensor]:
        """Those that no optimizer has had."""
        self._note_owned()
        return [param for param in self._trainable().values() if not self._is_owned(param)]

    def _check_replaced(
        self, optimizer: torch.optim.Optimizer, missing: Iterable[torch.Tensor]
    ) -> None:
        if find_engine(optimizer) is not None:  # engines look at this themselves
            return
        in_models = self._trainable()
        own = [param for group in optimizer.param_groups for param in group["params"]]
        orphans = [p for p in own if id(p) not in in_models and stored_grad(p) is None]
        lost: dict[torch.Size, list[torch.Tensor]] = {}
        for param in missing:
            if stored_grad(param) is not None:
                lost.setdefault(param.shape, []).append(param)
        found = [lost[p.shape].pop() for p in orphans if p.requires_grad and lost.get(p.shape)]
        if not found or 2 * len(found) < len(orphans):
            return
        self._replaced.update(map(id, found))
        name = self.seen.name(found[0])
        self.report(
            REPLACED,
            id(optimizer),
            f"{len(found)} of {len(own)} parameters of {type(optimizer).__name__} have no gradient "
            f"and are in no model; the model trains others of these shapes, such as {name}.",
            where=self.seen.facts(optimizer).made,
            parameters=len(own),
            without_model=len(found),
        )

    def _note_partly_owned(self) -> None:
        """Note what each model lacks; when the run ends, a model made in a function is gone."""
        for root in tuple(self.seen.roots):
            named = [(n, p) for n, p in root.named_parameters() if p.requires_grad]
            lacks = [
                _Missing(name, id(param), param.numel())
                for name, param in named
                if not self._is_owned(param) and id(param) not in self._replaced
            ]
            if lacks and len(lacks) < len(named):
                self._lacks[id(root)] = type(root).__name__, lacks, self._place(root)
            else:
                self._lacks.pop(id(root), None)

    def run_ended(self) -> None:
        """Report the models of which some parameters are trained and some are not."""
        if not self.seen.steps:
            return
        self._note_owned()
        self._note_partly_owned()
        for model, lacks, place in self._lacks.values():
            self._report_missing(model, [m for m in lacks if m.key not in self._owned], place)

    def _report_missing(self, model: str, missing: list[_Missing], place: Place | None) -> None:
        if not missing:
            return
        names = [one.name for one in missing]
        with_gradient = [one.name for one in missing if one.key in self._got_gradient]
        elements = sum(one.elements for one in missing)
        shown = ", ".join((with_gradient or names)[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        self.report(
            MISSING,
            names[0],
            f"{len(names)} trainable parameters of {model} ({elements:,} weights, "
            f"{len(with_gradient)} parameters with a gradient) are in no optimizer: {shown}{more}.",
            where=place,
            severity=None if with_gradient else Severity.INFO,
            parameters=names,
            with_gradient=with_gradient,
            weights=elements,
        )

    def _place(self, root: nn.Module) -> Place | None:
        own = {id(param) for param in root.parameters()}
        for optimizer, facts in tuple(self.seen.optimizers.items()):
            if own & {id(param) for param in self.seen.params(optimizer)}:
                return facts.made
        return None


@dataclass(slots=True)
class _Sums:
    """What the gradients of one optimizer's steps were."""

    steps: int = 0  # before which a backward had made gradients
    dropped: int = 0  # those in which there were none any more
    carried: int = 0  # those in which the gradients of the step before were in them
    summed: int = 0  # those of several backwards, undivided
    backwards: int = 0  # the most of those in a step
    kept: bool = False  # whether the last step has left what it used, and it is not zero
    # How many backwards before a step were dropped one by one, and before how many steps.
    last_only: Counter[int] = field(default_factory=Counter[int])
    where: Place | None = None


class Accumulation(Detector):
    """Finds PA403, PA404 and PA406."""

    RULES = (DROPPED, NEVER_ZEROED, NOT_DIVIDED)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._sums = defaultdict[OptimizerFacts, _Sums](_Sums)

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Look before the scaler refuses a step without gradients."""
        self._look(optimizer)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients, unless that was done."""
        if not self.seen.facts(optimizer).in_scaler:
            self._look(optimizer)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        gradients, behind = self.seen.gradients, self.seen.behind(optimizer)
        params = behind or list(self.seen.params(optimizer))
        known = self._sums[self.seen.facts(optimizer)]
        last = [(p, m) for p in params if (m := gradients.last(p)) is not None]
        made = [(p, m) for p, m in last if m.origin is not Origin.USED]
        if not made:
            return
        known.steps += 1
        known.where = known.where or current_place()
        live = [m for p, m in made if gradients.live(p) is not None]
        own = [param for group in optimizer.param_groups for param in group["params"]]
        size = None if live and not behind else largest(map(stored_grad, own if behind else params))
        there = [m.is_carried for p, m in made if stored_grad(p) is not None]
        if (behind or not live) and (size is None or float(size) == 0):
            known.dropped += 1
        elif known.kept and any(there):
            known.carried += 1
        if live and (dropped := min(mark.dropped for mark in live)):
            known.last_only[dropped] += 1
        if live and all(m.is_alike and not m.is_carried and m.backwards > 1 for m in live):
            known.summed += 1
            known.backwards = max(known.backwards, *(mark.backwards for mark in live))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Look what gradients are left, where nobody has zeroed them so far."""
        known = self._sums[self.seen.facts(optimizer)]
        if known.steps <= 2 * known.carried + 2:
            known.kept = self._has_gradients(optimizer) is True

    def backward_is_near(self, of_engine: bool) -> None:
        """Look again: what is zeroed through .data shows nowhere else."""
        for optimizer, facts in tuple(self.seen.optimizers.items()):
            known, has_engine = self._sums.get(facts), find_engine(optimizer) is not None
            if known is not None and known.kept and has_engine == of_engine:
                known.kept = self._has_gradients(optimizer) is not False

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether any is not zero; ``None`` if there are none."""
        params = self.seen.behind(optimizer) or self.seen.params(optimizer)
        size = largest(map(stored_grad, params))
        return None if size is None else float(size) != 0

    def run_ended(self) -> None:
        """Report optimizers whose steps got something else than they should."""
        for facts, known in self._sums.items():
            name, steps, where = facts.name, known.steps, known.where
            if 2 * known.dropped > steps:
                what = f"{name} had lost all gradients before {known.dropped} of {steps} steps."
                self.report(DROPPED, facts, what, where=where, steps=steps, dropped=known.dropped)
            dropped, times = next(iter(known.last_only.most_common(1)), (0, 0))
            if times >= _STEPS and 2 * times > steps:
                what = f"{times} of {name}'s {steps} steps used the last of {dropped + 1} backwards"
                what = f"{what} alone; the gradients of the others had been set to zero."
                self.report(DROPPED, facts, what, where=where, steps=steps, dropped=dropped)
            if known.carried >= _STEPS and 2 * known.carried > steps:
                what = f"{known.carried} of {name}'s {steps} steps had earlier gradients in theirs."
                self.report(NEVER_ZEROED, facts, what, where=where, steps=steps)
            if known.summed >= 2 and 2 * known.summed > steps:
                what = f"{known.summed} of {steps} steps used sums of {known.backwards} backwards."
                self.report(NOT_DIVIDED, facts, what, where=where, backwards=known.backwards)


class Frozen(Detector):
    """Finds PA408."""

    RULES = (FROZEN_MOVE,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is frozen in a step
        self._moved: Counter[int] = Counter()  # steps of each optimizer in which it moved

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what is frozen, and would not be left out."""
        begun, params = self.seen.facts(optimizer).begun, list(self.seen.params(optimizer))
        is_looked_at = begun <= _EARLY or not begun & (begun - 1)
        frozen = filter(self._is_frozen, params if is_looked_at else ())
        self._before = [(param, sample_of(param)) for param in frozen]
        if find_engine(optimizer) is not None or len(self._before) == len(params):
            self._before.clear()

    def _is_frozen(self, param: torch.Tensor) -> bool:
        grad, gradients = stored_grad(param), self.seen.gradients
        if grad is None or grad.layout is not torch.strided:
            return False
        mark = gradients.last(param)
        is_made = mark is not None and mark.origin is not Origin.USED
        is_written = is_made and gradients.live(param) is None
        return not param.requires_grad or (is_written and not bool(grad.any()))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare it, and report it at the second time."""
        pairs = [(old, sample_of(param)) for param, old in self._before]
        self._before.clear()
        moved = [(old, new) for old, new in pairs if not torch.equal(old, new)]
        self._moved[id(optimizer)] += bool(moved)
        if moved and self._moved[id(optimizer)] > 1:
            old, new = max(moved, key=lambda pair: len(pair[0]))
            before, after = (float(value.float().square().sum()) ** 0.5 for value in (old, new))
            count = "a frozen parameter" if len(moved) == 1 else f"{len(moved)} frozen parameters"
            what = f"{type(optimizer).__name__} has moved {count} again; the norm of one went from "
            what += f"{before:.6g} to {after:.6g} in this step."
            norms = {"before": before, "after": after}
            self.report(FROZEN_MOVE, id(optimizer), what, parameters=len(moved), **norms)


class Masters(Detector):
    """Finds PA405."""

    RULES = (NOT_COPIED,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._known = weakref.WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor]()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the model with what it was at the last look, and with the masters."""
        begun = self.seen.facts(optimizer).begun
        halves = () if begun & (begun - 1) else self.seen.behind(optimizer)
        own: list[torch.Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        size = largest(map(stored_grad, own)) if halves else None
        is_still = not any(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        if size is None or float(size) == 0 or is_still:
            return
        now, masters = torch.cat([*map(sample_of, halves)]), torch.cat([*map(sample_of, own)])
        before = self._known.get(optimizer)
        self._known[optimizer] = now
        if begun <= _STEPS or before is None or not torch.equal(now, before):
            return
        now = now[: len(masters)]  # of one long tensor there is less
        # Where they were copied, masters are the same when rounded, and have more digits.
        if torch.equal(masters.to(now.dtype), now) and not torch.equal(masters, now.float()):
            return
        name = type(optimizer).__name__
        what = f"At step {begun} of {name} {len(halves)} half parameters have not moved for long."
        self.report(NOT_COPIED, id(optimizer), what, steps=begun, parameters=len(halves))
