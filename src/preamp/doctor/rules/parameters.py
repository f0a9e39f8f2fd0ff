# SPDX-License-Identifier: BSD-3-Clause
"""PA4xx: what the optimizer updates is not what the model has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from preamp.core.tensors import stored_grad
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, define_rule
from preamp.doctor.seen import Seen
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
    why="""The optimizer was built first, and then the model's parameters were replaced: by a copy
    of the model, a new layer, a parametrization, or a conversion that makes new Parameter objects.
    Its steps change tensors that nobody reads, and the model does not learn.""",
    how="""In its first steps the optimizer has parameters that never have a gradient and belong to
    no model that was called, and the model has as many trainable ones of the same shapes, with
    gradients, that are in no optimizer.""",
    do="Build the optimizer after the model has its final device, dtype and layers.",
)

_STEPS = 3
_NAMED = 3


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
        self._owned: set[int] = set()
        self._lacks: dict[int, tuple[str, list[_Missing], Place | None]] = {}

    def group_added(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what it was given."""
        self._owned.update(id(param) for param in self.seen.params(optimizer))

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Look before the first step: a ``GradScaler`` refuses one without gradients."""
        if self.seen.facts(optimizer).begun == 0:
            self._note_owned()
            trainable = list(self._trainable())
            missing = [param for param in trainable if id(param) not in self._owned]
            self._check_replaced(optimizer, trainable, missing)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters have a gradient, at the first few and some later steps."""
        begun = self.seen.facts(optimizer).begun
        if begun > _STEPS and begun & (begun - 1):
            return
        self._note_owned()
        trainable = list(self._trainable())
        missing = [param for param in trainable if id(param) not in self._owned]
        self._got_gradient |= {id(p) for p in missing if stored_grad(p) is not None}
        self._note_partly_owned()
        if begun in (1, _STEPS):
            self._check_replaced(optimizer, trainable, missing)

    def _note_owned(self) -> None:
        for optimizer in tuple(self.seen.optimizers):
            self._owned.update(id(param) for param in self.seen.params(optimizer))

    def _trainable(self) -> Iterator[torch.Tensor]:
        done: set[int] = set()
        for root in tuple(self.seen.roots):
            for param in root.parameters():
                if param.requires_grad and id(param) not in done:
                    done.add(id(param))
                    yield param

    def _check_replaced(
        self,
        optimizer: torch.optim.Optimizer,
        trainable: Iterable[torch.Tensor],
        missing: Iterable[torch.Tensor],
    ) -> None:
        if find_engine(optimizer) is not None:  # engines look at this themselves
            return
        in_models = {id(param) for param in trainable}
        own = [param for group in optimizer.param_groups for param in group["params"]]
        orphans = [p for p in own if id(p) not in in_models and stored_grad(p) is None]
        lost: dict[torch.Size, list[torch.Tensor]] = {}
        for param in missing:
            if stored_grad(param) is not None:
                lost.setdefault(param.shape, []).append(param)
        pairs = [
            (orphan, lost[orphan.shape].pop())
            for orphan in orphans
            if orphan.requires_grad and lost.get(orphan.shape)
        ]
        if not pairs or 2 * len(pairs) < len(orphans):
            return
        self._replaced |= {id(param) for _, param in pairs}
        name = self.seen.name(pairs[0][1])
        self.report(
            REPLACED,
            id(optimizer),
            f"{len(pairs)} of {len(own)} parameters of {type(optimizer).__name__} have no gradient "
            f"and are in no model; the model trains others of these shapes, such as {name}.",
            where=self.seen.facts(optimizer).made,
            parameters=len(own),
            without_model=len(pairs),
        )

    def _note_partly_owned(self) -> None:
        """Note what each model lacks; when the run ends, a model made in a function is gone."""
        for root in tuple(self.seen.roots):
            named = [(n, p) for n, p in root.named_parameters() if p.requires_grad]
            lacks = [
                _Missing(name, id(param), param.numel())
                for name, param in named
                if id(param) not in self._owned and id(param) not in self._replaced
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
