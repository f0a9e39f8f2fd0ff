# SPDX-License-Identifier: BSD-3-Clause
"""Every op of the table: what each kernel is called with, and what becomes of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch

from preamp.kernels.jit import loops
from preamp.kernels.jit.formats import FORMATS, SPLITS, Layout
from preamp.kernels.jit.formulas import RECORDS, TOLD, Moments
from preamp.kernels.jit.loops import blocks_in, chunks_of, in_blocks, walk
from preamp.kernels.jit.words import CODES, ZEROS
from preamp.kernels.ops import Census, Column, Tensors
from preamp.kernels.plain import Plain
from preamp.kernels.plain.formulas import number_of
from preamp.kernels.plans import GRADS, Plan, check_lengths, pick
from preamp.kernels.rules import (
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    check_known,
)
from preamp.kernels.stored import join
from preamp.kernels.update import Scalar, Update
from preamp.kernels.vectors import norms_of
from preamp.kernels.works import Combining, Work

_PLAIN = Plain(fuses=False)
_CPU = torch.device("cpu")
_torch: Any = torch
_MOST = torch.finfo(torch.float32).max


def _walk(plan: Plan, kernel: Any, *arguments: Any) -> None:
    """Call a kernel on all lists of a plan, with the codes of their dtypes."""
    codes = _codes(*map(CODES.__getitem__, plan.dtypes))
    walk(kernel, chunks_of(plan), plan.rows, plan.at, codes, *arguments)


def _read(plan: Plan, row: int, kernel: Any, *arguments: Any) -> None:
    """Call a kernel on one list of a plan, with a zero of the type of its values."""
    zero = ZEROS[cast("torch.dtype", plan.dtypes[row])]
    one = slice(row, row + 1)
    walk(kernel, chunks_of(plan), plan.rows[one], plan.at[one], zero, *arguments)


@lru_cache(maxsize=64)
def _codes(*codes: int) -> np.ndarray:
    """For kernels, which only read them."""
    return np.array(codes)


def _number(value: Scalar) -> np.float32:
    """A number, or 0-dim tensor, as kernels take it."""
    value = _plain(value)
    return np.float32(math.copysign(math.inf, value) if abs(value) > _MOST else value)


def _plain(value: Scalar) -> float:
    if isinstance(value, torch.Tensor):  # of the host, where reading it waits for nothing
        if value.dtype is torch.float32 and value.is_cpu and not value.requires_grad:
            return float(value)
        return float(value.detach().reshape(()).to(_CPU, torch.float64).numpy())
    return float(value)


def _vector(values: Scalar, plan: Plan) -> np.ndarray:
    """One number for each tensor."""
    if not isinstance(values, torch.Tensor) or values.numel() == 1:
        return np.full(len(plan.places), _number(values))
    check_lengths(plan.places, cast("Any", values))
    return values.detach().to(_CPU, torch.float32).contiguous().numpy()


# -- measuring ------------------------------------------------------------------------------------


def _norms_in(plan: Plan, row: int, factor: torch.Tensor | None) -> np.ndarray:
    """The norm of each tensor × ``factor`` in one list, float64."""
    by = _number(1.0 if factor is None else factor)
    sums = np.empty(chunks_of(plan).table.shape[1])
    _read(plan, row, loops.sum_squares, by, sums)
    return np.sqrt(np.bincount(chunks_of(plan).table[0], sums, len(plan.places)))


def _largest(plan: Plan, row: int = 0) -> np.ndarray:
    """The largest magnitude of each tensor, nan above infinity, float64."""
    tops = np.zeros(chunks_of(plan).table.shape[1])
    _read(plan, row, loops.find_largest, tops)
    found = np.zeros(len(plan.places))
    with np.errstate(invalid="ignore"):  # a nan stays
        np.maximum.at(found, chunks_of(plan).table[0], tops)
    return found


def _norms_of(
    tensors: Tensors,
    parts: Sequence[Plan],
    others: Sequence[int],
    factor: torch.Tensor | None = None,
) -> np.ndarray:
    """The norm of each tensor × ``factor``, float64; ``parts`` and ``others`` from `planned`."""
    if len(parts) == 1 and not others:
        return _norms_in(parts[0], 0, factor)
    norms = np.zeros(len(tensors))
    for part in parts:
        norms[part.places] = _norms_in(part, 0, factor)
    if others:
        norms[others] = _PLAIN.l2norms(pick(tensors, others), factor, _CPU).numpy()
    return norms


def _norm(norms: np.ndarray) -> float:
    return math.sqrt(float((norms * norms).sum()))


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    number = _number(value)
    if device.type == "cpu":  # elsewhere a copy would wait for the device
        return cast("torch.Tensor", _torch.from_numpy(np.array(number)))
    return torch.full((), float(number), dtype=torch.float32, device=device)


def _float32(values: np.ndarray, device: torch.device) -> torch.Tensor:
    with np.errstate(over="ignore"):  # finite float64 values may lie beyond float32's range
        return cast("torch.Tensor", _torch.from_numpy(values.astype(np.float32)).to(device))


# -- updates --------------------------------------------------------------------------------------


class Launch(Work):
    """A work whose lists stand as kernels take them: `P`, `G`, `M`, maybe `V`, `H`, `L`, `S`, `T`.

    There is a row for state in any case; it has no dtype where the rule leaves state.
    """

    __slots__ = ("at", "chunks", "codes", "layout", "lists", "way")
    only_on: ClassVar[str | None] = "cpu"

    def __init__(self, plan: Plan, names: Sequence[str], rule: Rule, update: Update) -> None:
        super().__init__(plan, names, rule, update)
        if rule.leaves_state:
            self.dtypes["M"] = None
            self.states.clear()
            self.formats.clear()
        self.lists = 4 if self.dtypes.get("V") is not None else 3
        order = "PGMVHLST" if self.lists == 4 else "PGMHLS"
        self.at = np.zeros((len(order), len(plan.places)), np.int64)
        for row, name in enumerate(order):
            if self.dtypes.get(name) is not None:
                self.at[row] = plan.at[names.index(name)]
        self.chunks = chunks_of(plan)
        self.layout = None if update.stored is None else self._layout()
        self.way = self._on_the_way()
        kinds = [CODES.get(self.dtypes.get(name), 0) for name in "PGMVH"[: self.lists]]
        kinds.append(CODES.get(self.dtypes["H"], 0))
        if self.dtypes["L"] is not None:
            kinds[0] = SPLITS[self.dtypes["P"]]
        for row, kind in enumerate(self.formats, 2):
            kinds[row] = FORMATS.get(kind, kinds[row])
        self.codes = np.array(kinds)

    def _layout(self) -> Layout:
        """What kernels are told of how tensors are kept; in blocks chunks are whole ones."""
        rows, lengths = blocks_in(tuple([tensor.shape for tensor in self.rows("P")]))
        if self.in_blocks:
            self.chunks = in_blocks(self.chunks, rows, lengths)
        else:
            lengths = np.zeros_like(lengths)
        numbers, starts = self.numbers_and_starts()
        return Layout(
            rows=rows,
            lengths=lengths,
            numbers=np.array(numbers, np.uint32),
            starts=np.array(starts, np.int64),
            seed=np.uint32(self.stored.seed),
            step=np.uint32(0),
            by_chance=self.by_chance,
        )

    def _walk(self, kernel: Any, *arguments: Any) -> None:
        """Call a kernel on all lists, as they lie in this update."""
        layout = self.layout
        if layout is not None:
            layout = layout._replace(step=np.uint32(self.step & 0xFFFFFFFF))
        self.at[1] = self.plan.at[GRADS]
        walk(kernel, self.chunks, self.plan.rows, self.at, self.codes, layout, *arguments)

    @property
    def inv_scale(self) -> Scalar:
        """What unscales the gradients."""
        return 1.0 if self.update.inv_scale is None else self.update.inv_scale

    def _on_the_way(self) -> tuple[Any, Any]:
        """What stands for the dtypes of halves and lows that the update itself converts.

        Gradients and halves are, if all else has the computation's dtype; gradients, split
        parameters and lows always.
        """
        p, g, half = (self.dtypes[name] for name in "PGH")
        if self.dtypes["L"] is not None:
            return (ZEROS[p], np.int16(0)) if p == g else (None, None)
        wide = {p, *[self.dtypes.get(name) for name in "MV"[: self.lists - 2]]}
        is_usual = wide == {torch.float32} and g == half and self.leads
        return (ZEROS[half] if is_usual else None), None

    @property
    def step(self) -> int:
        """The number of the update."""
        step = self.update.step
        return int(step.item()) if isinstance(step, torch.Tensor) else step

    def correction(self, beta: float, *, wanted: bool) -> float:
        """``1 / (1 - beta ** step)``, or 1 for none."""
        left = 1.0 - beta**self.step if wanted else 1.0
        return 1.0 / left if left else math.inf

    def _told(self) -> Any:
        """What the rule's formulas are told of all elements: numbers as kernels take them."""
        rule = self.rule
        check_known(rule)
        numbers, options = cast("tuple[dict[str, Any], dict[str, Any]]", rule.terms)
        if isinstance(rule, (AdamRule, LambRule, NovoGradRule)):
            # Moments that are not corrected are multiplied by 1.
            wanted, options["CORRECTED"] = options.get("CORRECTED", rule.corrects), True
            numbers["c1"] = self.correction(rule.beta1, wanted=wanted)
            numbers["c2"] = self.correction(rule.beta2, wanted=wanted)
        numbers["size"] = rule.lr
        given: dict[str, Any] = {**options, "is_first": self.step == 1}
        for name, value in numbers.items():
            is_plain = value.__class__ is float and -_MOST <= value <= _MOST
            given[name] = np.float32(value) if is_plain else _number(value)
        records = [
            RECORDS[formula](tuple(map(given.__getitem__, TOLD[formula])))
            for formula in rule.formulas
        ]
        return records[0] if len(records) == 1 else Moments(*records)

    def _size(self) -> Scalar:
        """That of each tensor, or one for all: of NovoGrad a denominator, else a step's size."""
        rule = self.rule
        if isinstance(rule, (LambRule, LarsRule)):
            return self._measured_number()
        if isinstance(rule, NovoGradRule):
            c2 = self.correction(rule.beta2, wanted=rule.corrects)
            return self._measured_number() * c2**0.5 + rule.eps
        if isinstance(rule, AdamRule) and rule.bias_correction is BiasCorrection.STEP_SIZE:
            lr = rule.lr.detach() if isinstance(rule.lr, torch.Tensor) else rule.lr
            root = self.correction(rule.beta2, wanted=True) ** 0.5
            return float(lr) / root * self.correction(rule.beta1, wanted=True)
        return rule.lr

    @torch.no_grad()
    def start(self) -> None:
        """See `Work.start`; nothing is done where an overflow was found."""
        if self.update.found_inf is not None and _plain(self.update.found_inf) != 0:
            return
        told, by = self._told(), _number(self.inv_scale)
        numbers = _vector(self._size(), self.plan)
        second = ZEROS[torch.float32] if isinstance(told, Moments) else None
        half, low = self.way
        self._walk(loops.update, half, low, second, self.leads and half is None, by, numbers, told)
        self.note_written()

    def norms_needed(self) -> tuple[torch.Tensor, ...]:
        """The norms that the rule needs, given or measured."""
        rule, factor = self.rule, self.update.inv_scale
        if self.norms is not None:
            return self.norms.to(_CPU, torch.float32).unbind()
        self.take_over()
        if isinstance(rule, LambRule):
            return self._directions().unbind()
        if isinstance(rule, NovoGradRule) and rule.uses_max_norm:
            largest = _largest(self.plan, 1)
            wide = _torch.from_numpy(largest).to(torch.float32)
            return (wide if factor is None else wide * factor.to(_CPU, torch.float32),)
        norms = _torch.from_numpy(_norms_in(self.plan, 1, factor)).to(torch.float32)
        return (self._lengths(), norms) if isinstance(rule, LarsRule) else (norms,)

    def take_over(self) -> None:
        """Let parameters say what their half weights do, before norms are taken of them."""
        if self.leads:
            codes = _codes(CODES[self.dtypes["P"]], CODES[self.dtypes["H"]])
            rows, at = [self.rows("P"), self.rows("H")], self.at[[0, self.lists]]
            walk(loops.take_over_lists, chunks_of(self.plan), rows, at, codes)
            torch.autograd.graph.increment_version(self.rows("P"))

    def _lengths(self) -> torch.Tensor:
        """The norms of the parameters."""
        if self.dtypes["L"] is None:
            return _torch.from_numpy(_norms_in(self.plan, 0, None)).to(torch.float32)
        pairs = zip(self.rows("P"), self.rows("L"), strict=True)
        return torch.stack(norms_of([join(half.detach(), low.detach()) for half, low in pairs]))

    def _directions(self) -> torch.Tensor:
        """``|p|`` and ``|u|`` of each tensor."""
        sums = np.zeros((2, self.chunks.table.shape[1]))
        by = _number(self.inv_scale)
        self._walk(loops.measure_directions, by, sums[0], sums[1], self._told())
        owners, count = self.chunks.table[0], len(self.plan.places)
        norms = np.sqrt(np.stack([np.bincount(owners, row, count) for row in sums]))
        return cast("torch.Tensor", _torch.from_numpy(norms).to(torch.float32))

    @torch.no_grad()
    def _measured_number(self) -> Scalar:
        """Of each tensor what `plain.formulas.number_of` makes; that of NovoGrad is kept."""
        rule = self.rule
        lr = rule.lr.to(_CPU, torch.float32) if isinstance(rule.lr, torch.Tensor) else rule.lr
        numbers = self.rows("N")
        kept = _torch.stack(numbers).to(torch.float32) if numbers else None
        found = number_of(rule, lr, self.norms_needed() if rule.takes_norms else (), kept)
        if numbers:
            _torch._foreach_copy_(numbers, cast("torch.Tensor", found).unbind())
        return found


# -- the back end ---------------------------------------------------------------------------------


class Jit(Combining):
    """Every op in kernels that numba compiles."""

    name = "jit"
    plain = _PLAIN
    works = Launch

    # -- what is read and not written ------------------------------------------------------------

    @torch.no_grad()
    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        """See `preamp.kernels.ops.Ops.census`; values are looked at unless norms are finite."""
        parts, others = self._planned(grads)
        if not parts:
            return _PLAIN.census(grads, device, with_norm=with_norm)
        norm = None
        if with_norm:
            norms = _norms_of(grads, parts, others)
            norm = _scalar(_norm(norms), device)
            if np.isfinite(norms).all():
                return Census(_scalar(0.0, device), norm)
        largest = np.zeros(len(grads))
        for part in parts:
            largest[part.places] = _largest(part)
        if others:
            rest = _PLAIN.census(pick(grads, others), _CPU)
            largest[others] = cast("torch.Tensor", rest.max_abs).numpy()
        found_inf = _scalar(float(not np.isfinite(largest).all()), device)
        return Census(found_inf, norm, _float32(largest, device))

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        parts, others = self._planned(tensors)
        if not parts:
            return _PLAIN.l2norms(tensors, factor, device)
        return _float32(_norms_of(tensors, parts, others, factor), device)

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        """See `preamp.kernels.ops.Ops.l2norm`; summed in float64, as the norm of a census is."""
        check_lengths(tensors, factors)
        parts, others = self._planned(tensors)
        if not parts:
            return _PLAIN.l2norm(tensors, factors, device)
        distinct = dict(zip(map(id, factors), factors, strict=True))  # as a rule one
        each = {key: 1.0 if by is None else _plain(by) for key, by in distinct.items()}
        norms = _norms_of(tensors, parts, others)
        return _scalar(_norm(norms * [each[id(by)] for by in factors]), device)

    # -- scaling, adding, casting: see `Combining` ------------------------------------------------

    def _combine(
        self, plan: Plan, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        if factors:
            distinct = dict(zip(map(id, factors), factors, strict=True))
            numbers = {key: _plain(by) for key, by in distinct.items()}
            each = np.array([numbers[id(factors[place])] for place in plan.places], np.float32)
        else:
            each = _vector(a, plan)
        is_copy = not factors and isinstance(a, float) and a == 1.0 and not plan.rows[2]
        _walk(plan, loops.combine, each, _number(b), is_copy)
        torch.autograd.graph.increment_version(plan.rows[0])

    def _take_over(self, plan: Plan) -> None:
        _walk(plan, loops.take_over_lists)
        torch.autograd.graph.increment_version(plan.rows[0])

    def _convert(self, plan: Plan, *, joins: bool) -> None:
        kernel = loops.join_lists if joins else loops.split_lists
        half = ZEROS[cast("torch.dtype", plan.dtypes[1])]
        low = np.int16(0) if plan.rows[2] else None
        walk(kernel, chunks_of(plan), plan.rows, plan.at, half, low)
        for row in plan.rows[:1] if joins else plan.rows[1:]:
            torch.autograd.graph.increment_version(row)
