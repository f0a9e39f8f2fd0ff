# SPDX-License-Identifier: BSD-3-Clause
"""What a detector is told, and how it reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from preamp.doctor.rule import Finding, Place, Rule, Severity, current_place
from preamp.doctor.seen import Seen, Source

_HERE = Place("", 0)


class Findings:
    """What was found so far, once for each bug."""

    def __init__(self, selected: Iterable[Rule]) -> None:
        """Take findings of the ``selected`` rules, and drop others."""
        self._selected = {rule.id for rule in selected}
        self._known: set[tuple[str, object]] = set()
        self.found: list[Finding] = []

    def is_new(self, rule: Rule, key: object) -> bool:
        """Whether a finding of ``rule`` under ``key`` is wanted and was not reported."""
        return rule.id in self._selected and (rule.id, key) not in self._known

    def add(self, finding: Finding, key: object) -> None:
        """Keep a finding, unless there is one under the same key."""
        if self.is_new(finding.rule, key):
            self._known.add((finding.rule.id, key))
            self.found.append(finding)


class Detector:
    """Looks for the bugs of a few rules; told of everything that happens in the run.

    A detector reads and never changes what it is handed. It is called with the gradient mode as
    the script has it, so it detaches what it computes with.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, seen: Seen, findings: Findings) -> None:
        self.seen = seen
        self.findings = findings

    def report(
        self,
        rule: Rule,
        key: object,
        what: str,
        *,
        where: Place | None = _HERE,
        severity: Severity | None = None,
        do: str = "",
        **numbers: Any,
    ) -> None:
        """Report a bug; a second report under the same key is dropped.

        ``key`` tells this case from others of the rule, such as the optimizer's ``id``. ``what`` is
        what was seen; ``numbers`` are those in it, by name, as plain data. ``where`` is the line to
        blame, by default the one that is being executed. ``do`` is what to change in this case,
        where not all that the rule says is right.
        """
        finding = Finding(
            rule=rule,
            severity=severity or rule.severity,
            what=what,
            where=current_place() if where is _HERE else where,
            numbers=numbers,
            do=do,
        )
        self.findings.add(finding, key)

    # -- what happens in a run ---------------------------------------------------------------

    def group_added(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has been given parameters, perhaps while it is being built."""

    def module_called(self, module: nn.Module, output: Any) -> None:
        """A module has returned; told for the first few steps only."""

    def model_called(self, module: nn.Module, output: Any) -> None:
        """A module that the script called, with gradients on, has returned."""

    def model_evaluated(self, module: nn.Module) -> None:
        """A module that the script called, with gradients off, has returned."""

    def weights_loaded(self, module: nn.Module) -> None:
        """``module.load_state_dict(…)`` has run."""

    def script_failed(self) -> None:
        """A backward or a step has raised an error."""

    def model_failed(self) -> None:
        """A module that the script called, with gradients on, has raised an error."""

    def written(self, target: torch.Tensor) -> None:
        """The script has computed in place on a half tensor; told for one step only."""

    def saved(self, content: object) -> None:
        """``torch.save(content, …)`` is about to run."""

    def loaded(self, content: object) -> None:
        """``torch.load`` has returned ``content``."""

    def state_restored(self, thing: object) -> None:
        """``thing.load_state_dict(…)`` has run, of an optimizer or a ``GradScaler``."""

    def loss_made(self, loss: torch.Tensor) -> None:
        """A backward from ``loss`` is about to run; it carries no loss scale."""

    def loss_read(self, loss: torch.Tensor) -> None:
        """The script is about to read a scalar that has a graph."""

    def backward_is_near(self, of_engine: bool) -> None:
        """A backward is about to run, or an engine to take its gradients away for one."""

    def gradients_clipped(self, params: Sequence[torch.Tensor], name: str) -> None:
        """The clipping function ``name`` is about to run."""

    def scaled_backward_begins(
        self, scaler: torch.amp.GradScaler, roots: Sequence[torch.Tensor]
    ) -> None:
        """A backward from ``roots``, a loss that ``scaler`` has scaled, is about to run."""

    def backward_ended(self, source: Source, reached: Collection[int]) -> None:
        """A backward has run, and has marked the gradients of parameters with these ``id``s."""

    def gradients_unscaled(
        self, params: Sequence[torch.Tensor], scaler: object, scale: Callable[[], float]
    ) -> None:
        """``scaler`` is about to unscale the gradients of ``params``; ``scale`` synchronises."""

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """``scaler.step(optimizer)`` is about to run; it may leave the step out or raise."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to update weights."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has updated weights."""

    def step_over(self) -> None:
        """A step of an optimizer was counted, or that a ``GradScaler`` has left it out."""

    def schedule_stepped(self, scheduler: Any) -> None:
        """A learning-rate scheduler is about to step."""

    def run_ended(self) -> None:
        """The script has ended, in whatever way."""
