# SPDX-License-Identifier: BSD-3-Clause
"""Each op in torch's operations on lists: the definition of what it means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import host_reaches
from preamp.kernels.checks import check_shapes, check_stored
from preamp.kernels.ops import Census, Column, Ops, Tensors
from preamp.kernels.plain.formulas import computed, measured, number_of, order_of
from preamp.kernels.plain.fused import fused_kernel
from preamp.kernels.plain.lists import Lists, Run, runs
from preamp.kernels.plain.slots import LOW, PARAM, STATE, Slot, put
from preamp.kernels.plans import check_lengths, pick
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.stored import Format, join, split, taken_over
from preamp.kernels.update import Scalar, Update
from preamp.kernels.vectors import max_norm, norm, norms_of, stack

_torch: Any = torch


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers a gradient holds; duplicates of an uncoalesced sparse one are summed first."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values


def _extremes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value; nan if there is one."""
    if values.numel() == 0:
        zero = torch.zeros((), dtype=values.dtype, device=values.device)
        return zero, zero
    # aminmax reads once and propagates nan; an infinity norm is 20 times slower on CPUs.
    low, high = torch.aminmax(values)
    return low, high


def _combine_sparse_(grad: torch.Tensor, a: Scalar, b: Scalar, addend: torch.Tensor | None) -> None:
    """``grad = a * grad + b * addend``, of gradients that are sparse."""
    dtype = math_dtype(grad.dtype)  # torch has no sum of sparse float16 tensors either
    total = grad.to(dtype).coalesce()
    result: torch.Tensor = cast("Any", torch).sparse_coo_tensor(
        total.indices(), total.values() * a, total.shape, check_invariants=False
    )
    if addend is not None:
        result = result + addend.to(dtype) * b
    # Replacing the data keeps the gradient's identity: callers may hold this very tensor.
    grad.data = result.to(grad.dtype).coalesce()


def _far_norms(
    tensors: Tensors, order: float, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The norm of each on a device, one call for all of a dtype; zero for an empty tensor."""
    found = torch.zeros(len(tensors), dtype=wide, device=device)
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            places.setdefault(tensor.dtype, []).append(place)
    for dtype, own in places.items():
        norms = norms_of([tensors[place] for place in own], order, math_dtype(dtype))
        # An index would have to be copied to the device.
        _torch._foreach_copy_([found[place] for place in own], norms)
    return found


def _check(params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update) -> None:
    """Refuse lists that do not fit before anything is changed."""
    numbers = state[-1:] if rule.has_numbers else ()
    shaped = [params, grads, *state[: len(state) - len(numbers)]]
    halves = [] if update.halves is None else [update.halves]
    check_lengths(*shaped, *numbers, *halves)
    if params:
        check_shapes(*shaped, *halves)
    check_stored(params, update)


class Plain(Ops):
    """Every op in torch's operations on lists.

    ``fuses``: whether torch's fused kernels update where a rule is theirs. ``near`` and ``far``:
    elements of a run, on the host for each thread, and on other devices. ``reads``: whether values
    on the host may be read; else it is treated as any other device.
    """

    name = "plain"

    def __init__(
        self, *, fuses: bool = True, near: int = 1 << 17, far: int = 1 << 24, reads: bool = True
    ) -> None:
        self._fuses, self._reads = fuses, reads
        self._near, self._far = near, far

    def _runs(self, *columns: Column, cuts: bool = True) -> Iterator[Run]:
        leaders = cast("Tensors", columns[0])
        is_near = bool(leaders) and host_reaches(leaders[0])
        most = self._near * torch.get_num_threads() if is_near else self._far
        return runs(columns, most, cuts=cuts)

    # -- what is read and not written ------------------------------------------------------------

    @torch.no_grad()
    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        norm = self.l2norm(grads, [None] * len(grads), device) if with_norm else None
        zero = torch.zeros((), dtype=torch.float32, device=device)
        if not grads:
            return Census(found_inf=zero, norm=norm, max_abs=zero.new_zeros(0))
        if norm is not None and self._reads and host_reaches(norm) and norm.isfinite():
            return Census(found_inf=zero, norm=norm)  # no need to look further
        # Finite float64 values may lie beyond float32's range, so they are judged in float64.
        has_float64 = any(grad.dtype is torch.float64 for grad in grads)
        wide = torch.float64 if has_float64 else torch.float32
        values = list(map(_values, grads))
        if all(map(host_reaches, values)):
            extremes = [end.to(device, wide) for value in values for end in _extremes(value)]
            max_abs = stack(extremes).abs().reshape(-1, 2).amax(dim=1)
        else:
            max_abs = _far_norms(values, math.inf, wide, device)
        found_inf = 1.0 - torch.isfinite(max_abs).all().to(torch.float32)
        if has_float64:  # what is finite stays so
            most = torch.finfo(torch.float32).max
            max_abs = torch.where(max_abs.isfinite(), max_abs.clamp(max=most), max_abs)
        return Census(found_inf=found_inf, norm=norm, max_abs=max_abs.to(torch.float32))

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float32, device=device)

        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            values = _values(tensor)
            if factor is None:
                return values
            return values.to(math_dtype(values.dtype)) * factor.to(values.device)

        if not all(map(host_reaches, tensors)):
            return _far_norms(list(map(scaled, tensors)), 2.0, torch.float32, device)
        norms = [norm(scaled(tensor), math_dtype(tensor.real.dtype)) for tensor in tensors]
        return stack([each.to(device, torch.float32) for each in norms])

    # -- scaling, adding, casting ----------------------------------------------------------------

    @torch.no_grad()
    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        check_lengths(targets, xs, ys)
        if isinstance(a, float) and a == 1.0 and all([y is None for y in ys]):
            put(targets, xs, None)
            return
        dense = [place for place, target in enumerate(targets) if not target.is_sparse]
        for place in set(range(len(targets))).difference(dense):
            _combine_sparse_(targets[place], a, b, ys[place])
        for run in self._runs(*[pick(column, dense) for column in (targets, xs, ys)]):
            outs, ins, others = run.columns
            self._combine(outs, a, ins, b, others)

    def _combine(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        wide = [x.to(_math_dtype(x)) for x in xs]
        by_x, by_y = (_near(by, wide[0].device) for by in (a, b))
        sums = list((Lists(wide) * by_x).each)
        for place, y in enumerate(ys):
            if y is not None:
                y = y.to(_math_dtype(y))
                is_one = isinstance(by_y, float) and by_y == 1.0
                sums[place] = sums[place] + (y if is_one else y * by_y)
        put(targets, sums, None)

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        check_lengths(halves, factors, addends)
        results: list[torch.Tensor] = []
        for run in self._runs(halves, factors, addends, cuts=False):
            own, by, sums = run.columns
            wide = [h.to(torch.float32, memory_format=torch.preserve_format) for h in own]
            wide = Lists(wide) * Lists([factor.to(own[0].device) for factor in by])
            for addend, value in zip(sums, wide.each, strict=True):
                results.append(value if addend is None else addend.add_(value))
        return results

    @torch.no_grad()
    def take_over_(self, masters: Tensors, halves: Tensors) -> None:
        for run in self._runs(masters, halves):
            put(run.columns[0], list(map(taken_over, *run.columns)), None)

    @torch.no_grad()
    def split_(self, wides: Tensors, halves: Tensors, lows: Column) -> None:
        for run in self._runs(wides, halves, lows):
            for wide, *targets in zip(*run.columns, strict=True):
                for target, value in zip(targets, split(wide, targets[0].dtype), strict=True):
                    if target is not None:
                        target.copy_(value)

    @torch.no_grad()
    def join_(self, halves: Tensors, lows: Tensors, wides: Tensors) -> None:
        for run in self._runs(wides, halves, lows):
            put(run.columns[0], list(map(join, *run.columns[1:])), None)

    # -- update rules ----------------------------------------------------------------------------

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        _check(params, grads, *state, rule=rule, update=update)
        if not params:
            return
        is_near = self._reads and host_reaches(params[0])
        if is_near and update.found_inf is not None:
            if update.found_inf.item() != 0:
                return
            update = replace(update, found_inf=None)
        columns, dtype = _columns(params, grads, *state, rule=rule, update=update)
        numbers = state[-1] if rule.has_numbers else ()
        number: Scalar = rule.lr
        if rule.takes_norms or numbers:
            norms: Sequence[torch.Tensor] = ()
            if rule.takes_norms:
                norms = self._norms(columns, rule, update, dtype)
            device = params[0].device
            lr = rule.lr.to(device, dtype) if isinstance(rule.lr, torch.Tensor) else rule.lr
            kept = stack([n.detach() for n in numbers]).to(dtype) if numbers else None
            number = number_of(rule, lr, norms, kept)
        fused = fused_kernel(rule, update) if self._fuses and is_near else None
        if fused is not None and not _is_wide(columns, dtype):
            fused = None
        for run in self._runs(*columns, cuts=not _has_fewer_bits(update)):
            slot = Slot(run, update, dtype, reads=is_near)
            if fused is not None and run.is_flat:
                fused(slot.p.each, slot.g.each, [column.each for column in slot.state])
                slot.store(slot.p, *slot.state)
            else:
                slot.store(*computed(slot, rule, update.step, number))
        if numbers:
            values = cast("torch.Tensor", number).unbind()
            put([n.detach() for n in numbers], values, update.found_inf)

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        rule = replace(rule, uses_trust_ratio=True)
        _check(params, grads, *state, rule=rule, update=update)
        columns, dtype = _columns(params, grads, *state, rule=rule, update=update)
        return stack(self._norms(columns, rule, replace(update, norms=None), dtype))

    def _norms(
        self, columns: Sequence[Column], rule: Rule, update: Update, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """The norms that the rule needs, a vector of each kind: given, or measured."""
        params = cast("Tensors", columns[PARAM])
        if update.norms is not None:
            return update.norms.to(params[0].device, dtype).unbind()
        is_l2 = order_of(rule) == 2.0
        found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in params]
        for run in self._runs(*columns, cuts=not _has_fewer_bits(update)):
            values = measured(Slot(run, update, dtype, reads=False), rule, update.step)
            norms = [norms_of(v.each) if is_l2 else list(map(max_norm, v.each)) for v in values]
            for place, row in zip(run.places, zip(*norms, strict=True), strict=True):
                found[place].append(row)
        whole = norm if is_l2 else torch.amax
        kinds = [
            [pieces[0] if len(pieces) == 1 else whole(stack(pieces)) for pieces in kind]
            for kind in zip(*[zip(*rows, strict=True) for rows in found], strict=True)
        ]
        return list(map(stack, kinds))


def _columns(
    params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
) -> tuple[list[Column], torch.dtype]:
    """The columns that `slots` names, and the dtype of the computation."""
    none: Column = [None] * len(params)
    lows = None if update.stored is None else update.stored.lows
    shaped = () if rule.leaves_state else state[: len(state) - rule.has_numbers]
    columns = [params, grads, update.halves or none, lows or none, *shaped]
    return columns, math_dtype(params[0].dtype) if params else torch.float32


def _has_fewer_bits(update: Update) -> bool:
    """Whether state is: in blocks, and by a chance that goes by the indices of whole tensors."""
    return update.stored is not None and bool({*update.stored.formats} - {Format.PLAIN})


def _is_wide(columns: Sequence[Column], dtype: torch.dtype) -> bool:
    """Whether parameters, or what is joined to be them, and state have the computation's dtype."""
    is_split = any(low is not None for low in columns[LOW])
    wide = columns[STATE:] if is_split else [columns[PARAM], *columns[STATE:]]
    return all({cast("torch.Tensor", t).dtype for t in column} == {dtype} for column in wide)


def _math_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_complex() else math_dtype(tensor.dtype)


def _near(factor: Scalar, device: torch.device) -> Scalar:
    return factor.to(device).reshape(()) if isinstance(factor, torch.Tensor) else factor
