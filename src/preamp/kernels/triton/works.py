# SPDX-License-Identifier: BSD-3-Clause
"""The launches of one update: their tables, and what its kernels are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from preamp.core.tensors import is_capturing
from preamp.kernels.plans import GRADS, Plan
from preamp.kernels.rules import (
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    check_known,
)
from preamp.kernels.stored import BLOCK as SLOTS
from preamp.kernels.stored import Format, scales_shape
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import (
    check_devices,
    given,
    launch,
    moved,
    number,
    numbers,
    scalar,
    width_of,
)
from preamp.kernels.triton.reductions import gather, measure
from preamp.kernels.triton.tables import CHUNK, Table, pointers, stream_of, table
from preamp.kernels.triton.updates import KINDS_OF_RULES, average_norms, update_kernel
from preamp.kernels.update import Update
from preamp.kernels.works import Work

_NUMBERS = ("beta1", "share", "beta2", "rest", "momentum", "eps", "coefficient")
_OPTIONS = ("TRUST_RATIO", "STEP_SIZE", "CORRECTS", "COUPLED", "DECOUPLED", "CORRECTED",
            "EPS_INSIDE", "NESTEROV", "BEFORE", "AFTER", "INSIDE")  # fmt: skip
_UNUSED = {**dict.fromkeys(_NUMBERS, 0), **dict.fromkeys(_OPTIONS, False), "HAS_MOMENTUM": True}


class Launch(Work):
    """A work with its tables; halves and lows are one list for kernels, called ``H``.

    Gradients have a table of their own, since they alone lie elsewhere in each step. That of the
    other lists is made once: parameters, state, halves if there are any, numbers if the rule has
    some.
    """

    __slots__ = ("entries", "grads", "half_row", "kept", "kinds", "plain", "stream")

    def __init__(self, plan: Plan, names: Sequence[str], rule: Rule, update: Update) -> None:
        check_devices([plan.device])
        super().__init__(plan, names, rule, update)
        dtypes = {name: self.dtypes.get(name) for name in "PGMVN"}
        dtypes["H"] = self.dtypes["H"] or self.dtypes["L"]
        self.kinds = {name: KINDS[dtype] for name, dtype in dtypes.items()}
        for name, kind in zip(self.states, self.formats, strict=True):
            if kind is Format.BFLOAT16:
                self.kinds[name] = KINDS[torch.int16]  # as kernels call it
        self.half_row = 1 + len(self.states)
        self.stream: int | None = None  # of the tables
        self.plain: Table  # of the lists that stay
        self.entries: Table  # the same with what tells how they are kept
        self.grads: torch.Tensor
        self.kept = 0  # in which row of these that begins

    def _lay_tables(self) -> None:
        """Have tables for this update, which runs on the current stream."""
        plan, stream = self.plan, stream_of(self.plan.device)
        is_captured = is_capturing(plan.device)
        if is_captured or stream != self.stream:
            rows = [n for n, row in enumerate(plan.rows) if row and n != GRADS]
            self.plain = self.entries = table(plan, plan.at[rows], in_order=True)
            if self.by_chance:
                self._keep()
            self.stream = None if is_captured else stream
        self.grads = pointers(plan.device, plan.at[GRADS])

    def _keep(self) -> None:
        """Have a table with scales of both lists, numbers, starts, and lengths of rows behind."""
        plan = self.plan
        is_scales = [name in "ST" for name in self.names]
        rows = [n for n, row in enumerate(plan.rows) if row and n != GRADS and not is_scales[n]]
        scales = np.zeros((2, len(plan.places)), np.int64)
        own = plan.at[len(self.names) - sum(is_scales) :]
        scales[: len(own)] = own
        shapes = [tensor.shape for tensor in self.rows("P")]
        behind = [*self.numbers_and_starts(), [math.prod(shape[1:]) for shape in shapes]]
        sizes = None
        if self.in_blocks:
            sizes = [math.prod(scales_shape(shape)) * SLOTS for shape in shapes]
        at = np.concatenate([plan.at[rows], scales, np.asarray(behind, np.int64)])
        self.kept = len(rows)
        self.entries = table(plan, at, sizes, in_order=True)

    # -- what kernels are told -------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        """What measuring and updating take."""
        rule = self.rule
        check_known(rule)
        terms, options = rule.terms
        corrects = rule.corrects
        match rule:
            case AdamRule():
                options["STEP_SIZE"] = rule.bias_correction is BiasCorrection.STEP_SIZE
            case LambRule():
                options["TRUST_RATIO"] = rule.uses_trust_ratio
            case LarsRule():
                options["TRUST_RATIO"] = rule.uses_trust_ratio
                terms |= {"eps": rule.eps, "coefficient": rule.trust_coefficient}
            case NovoGradRule():
                options["CORRECTS"], terms["eps"] = True, rule.eps
            case _:
                pass
        betas = {"correction1": terms.get("beta1", 0.0), "correction2": getattr(rule, "beta2", 0.0)}
        return {
            **_UNUSED,
            "CORRECTS": corrects,
            **scalar("lr", rule.lr, self.entries),
            **self._corrections(corrects, **betas),
            **self._chance(),
            **numbers(**terms),
            **options,
            "RULE": cast("Any", KINDS_OF_RULES[type(rule)]).value,
        }

    def _corrections(self, wanted: bool, **betas: float) -> dict[str, Any]:
        """Keyword arguments for the kernel's ``correction``, and ``STEP_AT``."""
        step = self.update.step
        arguments = scalar("step", step, self.entries)
        on_device = arguments["STEP_AT"]
        for name, beta in betas.items():
            if not wanted:
                beta = 0.0  # no correction: 1 - 0 is 1
            if on_device:
                value = math.log(beta) if beta > 0 else -math.inf
            else:
                value = 1.0 - beta ** cast("int", step)
            arguments[name] = number(value)
        return arguments

    def _chance(self) -> dict[str, Any]:
        """Keyword arguments for lists that are kept in fewer bits."""
        step, turn_at = self.update.step if self.by_chance else 0, None
        if isinstance(step, torch.Tensor):
            step, turn_at = 0, moved(step, self.plan.device)
        return {
            "KEPT": self.kept,
            "CHANCE": self.by_chance,
            "IN_BLOCKS": self.in_blocks,
            "seed": self.stored.seed if self.by_chance else 0,
            "turn": step,
            "turn_at": self.entries.layout if turn_at is None else turn_at,
            "TURN_AT": turn_at is not None,
        }

    def _launch(self, **arguments: Any) -> None:
        launch(
            update_kernel,
            (self.entries.chunks,),
            self.entries,
            grads=self.grads,
            **given("inv_scale", self.update.inv_scale, self.entries),
            **given("found_inf", self.update.found_inf, self.entries),
            **{name: self.kinds[name] for name in "PGMVH"},
            H_ROW=self.half_row,
            LEADS=self.leads,
            CHUNK=CHUNK,
            WIDTH=width_of(*[self.dtypes.get(name) for name in "PMV"]),
            **arguments,
        )

    # -- updating, and measuring before it ---------------------------------------------------------

    def start(self) -> None:
        """See `Work.start`; before it what measures norms, if the rule needs any."""
        self._lay_tables()
        arguments = self._arguments()
        self._launch(norms=self._norms(arguments), MEASURE=False, **arguments)
        self.note_written()

    def _norms(self, arguments: dict[str, Any]) -> torch.Tensor:
        """What the rule needs of whole tensors, a row for each kind of norm."""
        rule, known = self.rule, None if self.norms is None else self.norms.float().contiguous()
        if isinstance(rule, NovoGradRule):
            return self._blended(rule, None if known is None else known[0])
        if known is not None:
            return known
        if isinstance(rule, LambRule) and rule.uses_trust_ratio:
            return self._directions(arguments)
        if isinstance(rule, LarsRule) and rule.uses_trust_ratio:
            return torch.stack([self._lengths(), self._of_grads()])
        return self.entries.layout  # not read

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.plan.device)

    def _directions(self, arguments: dict[str, Any]) -> torch.Tensor:
        norms, partials = self._empty(2, self.entries.count), self._empty(2, self.entries.chunks)
        self._launch(norms=partials, MEASURE=True, **(arguments | {"CHANCE": False}))
        for sums, results in zip(partials, norms, strict=True):
            gather(self.entries, sums, results, largest=False)
        return norms

    def _lengths(self) -> torch.Tensor:
        """The norm of each parameter, as halves or lows beside it say."""
        is_told = self.leads or self.dtypes["L"] is not None
        beside = self.dtypes["L"] or self.dtypes["H"] if is_told else None
        return self._gathered(self.plain, "P", beside=(self.half_row, beside))

    def _of_grads(self, *, largest: bool = False) -> torch.Tensor:
        """The norm of each gradient without the scale, or its largest magnitude."""
        entries, factor = replace(self.plain, pointers=self.grads), self.update.inv_scale
        return self._gathered(entries, "G", factor=factor, largest=largest)

    def _gathered(
        self, entries: Table, name: str, *, largest: bool = False, **told: Any
    ) -> torch.Tensor:
        column = 0, self.dtypes[name]
        partials = measure(entries, column, largest=largest, squares=not largest, **told)
        results = self._empty(entries.count)
        gather(entries, partials[0], results, largest=largest)
        return results

    def _blended(self, rule: NovoGradRule, measured: torch.Tensor | None) -> torch.Tensor:
        """Blend the gradients' norms into the averages; also stores these."""
        if measured is None:
            measured = self._of_grads(largest=rule.uses_max_norm)
        averages = torch.empty_like(measured)
        launch(
            average_norms,
            (self.entries.count,),
            self.entries,
            norms=measured,
            averages=averages,
            **numbers(beta2=rule.beta2, beta2_left=1 - rule.beta2),
            **given("found_inf", self.update.found_inf, self.entries),
            N=self.kinds["N"],
            ROW=self.half_row + (self.kinds["H"] is not None),
            USES_MAX=rule.uses_max_norm,
        )
        return averages
