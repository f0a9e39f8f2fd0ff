# SPDX-License-Identifier: BSD-3-Clause
"""The reference back end: each op in plain torch operations, the definition of what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import in_memory_order
from preamp.kernels.ops import Census, Column, Ops, Tally, Tensors
from preamp.kernels.places import check_lengths, check_shapes, check_stored
from preamp.kernels.reference.formulas import apply, measured, number_of, order_of
from preamp.kernels.reference.stored import Unpacked, update_stored
from preamp.kernels.reference.tally import blocks_of, tally
from preamp.kernels.reference.update import Slot, slots
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.stored import join, split
from preamp.kernels.update import Scalar, Update
from preamp.kernels.vectors import max_norm, norm, stack


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers a gradient holds; duplicates of an uncoalesced sparse one are summed first."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value; nan if there is one."""
    values = _values(tensor)
    if values.numel() == 0:
        zero = torch.zeros((), dtype=values.dtype, device=values.device)
        return zero, zero
    # aminmax reads once and propagates nan; an infinity norm is 20 times slower on CPUs.
    low, high = torch.aminmax(values)
    return low, high


def _scale_add_sparse_(grad: torch.Tensor, factor: Scalar, addend: torch.Tensor | None) -> None:
    dtype = math_dtype(grad.dtype)  # torch has no sum of sparse float16 tensors either
    total = grad.to(dtype).coalesce()
    result: torch.Tensor = cast("Any", torch).sparse_coo_tensor(
        total.indices(), total.values() * factor, total.shape, check_invariants=False
    )
    if addend is not None:
        result = result + addend.to(dtype)
    # Replacing the data keeps the gradient's identity: callers may hold this very tensor.
    grad.data = result.to(grad.dtype).coalesce()


def _norm(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = _values(tensor)
    return norm(values, math_dtype(values.dtype)).to(device, torch.float32)


def norms_of(slot: Slot, rule: Rule, update: Update) -> tuple[torch.Tensor, ...]:
    """The norms that ``rule`` needs of one tensor."""
    measure = norm if order_of(rule) == 2.0 else max_norm
    return tuple(measure(values) for values in measured(slot, rule, update.step))


def _check(params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update) -> None:
    """Refuse lists that do not fit before anything is changed."""
    numbers = state[-1:] if rule.has_numbers else ()
    shaped = [params, grads, *state[: len(state) - len(numbers)]]
    halves = [] if update.halves is None else [update.halves]
    check_lengths(*shaped, *numbers, *halves)
    if params:
        check_shapes(*shaped, *halves)
    check_stored(params, state, update)


def _aligned_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, so that no temporary is as large as the whole."""
    tensors = tuple([tensor.detach() for tensor in tensors])
    alike = len({tensor.stride() for tensor in tensors}) == 1
    try:
        flat = [in_memory_order(tensor) for tensor in tensors] if alike else []
    except RuntimeError:  # not dense
        flat = []
    yield from zip(*map(blocks_of, flat), strict=True) if flat else [tensors]


class Reference(Ops):
    """Each op on one tensor after the other."""

    name = "reference"

    @torch.no_grad()
    def census(
        self,
        grads: Tensors,
        device: torch.device,
        *,
        with_norm: bool = False,
        with_max_abs: bool = True,
    ) -> Census:
        del with_max_abs  # they are how an overflow is found
        norm = self.l2norm(grads, [None] * len(grads), device) if with_norm else None
        if not grads:
            zero = torch.zeros((), dtype=torch.float32, device=device)
            return Census(found_inf=zero, norm=norm, max_abs=zero.new_zeros(0))
        # Finite float64 values may lie beyond float32's range, so they are judged in float64.
        has_float64 = any(grad.dtype is torch.float64 for grad in grads)
        wide = torch.float64 if has_float64 else torch.float32
        extremes = [value.to(device, wide) for grad in grads for value in _extremes(grad)]
        max_abs = stack(extremes).abs().reshape(-1, 2).amax(dim=1)
        found_inf = 1.0 - torch.isfinite(max_abs).all().to(torch.float32)
        return Census(found_inf=found_inf, norm=norm, max_abs=max_abs.to(torch.float32))

    @torch.no_grad()
    def scale_add_(self, grads: Tensors, factor: Scalar, addends: Column) -> None:
        factors: dict[tuple[torch.device, torch.dtype], Scalar] = {}
        for grad, addend in zip(grads, addends, strict=True):
            dtype = math_dtype(grad.dtype)
            key = (grad.device, dtype)
            if key not in factors:
                factors[key] = factor.to(*key) if isinstance(factor, torch.Tensor) else factor
            by = factors[key]
            if grad.is_sparse:
                _scale_add_sparse_(grad, by, addend)
            elif grad.dtype is dtype or grad.is_complex():
                grad.mul_(by)
                if addend is not None:
                    grad.add_(addend)
            else:
                wide = grad.to(dtype) * by
                grad.copy_(wide if addend is None else wide + addend.to(dtype))

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for half, factor, addend in zip(halves, factors, addends, strict=True):
            wide = half.to(torch.float32, memory_format=torch.preserve_format, copy=True)
            wide.mul_(factor.to(half.device))
            results.append(wide if addend is None else addend.add_(wide))
        return results

    @torch.no_grad()
    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    @torch.no_grad()
    def split_(self, wides: Tensors, halves: Tensors, lows: Column) -> None:
        for wide, half, low in zip(wides, halves, lows, strict=True):
            targets = [half] if low is None else [half, low]
            for source, *parts in _aligned_blocks(wide, *targets):
                for part, value in zip(parts, split(source, half.dtype), strict=False):
                    part.copy_(value)

    @torch.no_grad()
    def join_(self, halves: Tensors, lows: Tensors, wides: Tensors) -> None:
        for tensors in zip(wides, halves, lows, strict=True):
            for wide, half, low in _aligned_blocks(*tensors):
                wide.copy_(join(half, low))

    @torch.no_grad()
    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        for target, x, y in zip(targets, xs, ys, strict=True):
            wide = x.to(math_dtype(x.dtype)) * a
            target.copy_(wide if y is None else wide + y.to(math_dtype(y.dtype)) * b)

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float32, device=device)
        if factor is None:
            return stack([_norm(tensor, device) for tensor in tensors])
        scaled = (_values(t).to(math_dtype(t.dtype)) * factor.to(t.device) for t in tensors)
        return stack([_norm(tensor, device) for tensor in scaled])

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        norms: list[torch.Tensor] = []
        for tensor, factor in zip(tensors, factors, strict=True):
            one = _norm(tensor, device)
            norms.append(one if factor is None else one * factor.to(device))
        if not norms:
            return torch.zeros((), dtype=torch.float32, device=device)
        return norm(stack(norms))

    @torch.no_grad()
    def tally(self, tensors: Tensors) -> list[Tally]:
        return list(map(tally, tensors))

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        _check(params, grads, *state, rule=rule, update=update)
        if update.stored is not None:

            def run(one: Unpacked, grad: torch.Tensor) -> None:
                state = ([tensor] for tensor in one.state or [one.param])
                self.update_([one.param], [grad], *state, rule=rule, update=one.update)

            update_stored(run, params, grads, () if rule.leaves_state else state, update)
            return
        for place, slot in enumerate(slots(params, grads, *state, update=update)):
            if update.norms is not None:
                norms = slot.scalar(update.norms[:, place]).unbind()
            else:
                norms = norms_of(slot, rule, update)
            kept = slot.state[-1] if rule.has_numbers else None
            number = number_of(rule, slot.scalar(rule.lr), norms, kept)
            apply(slot, rule, update.step, number)
            if isinstance(number, torch.Tensor) and rule.has_numbers:
                slot.keep(number)

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        rule = replace(rule, uses_trust_ratio=True)
        if update.stored is not None:
            every = [Unpacked.of(n, (params, *state), update) for n in range(len(params))]
            params, state = (
                [one.param for one in every],
                tuple(zip(*[u.state for u in every], strict=True)),
            )
            update = replace(update, stored=None)
        places = slots(params, grads, *state, update=update)
        found = [norms_of(slot, rule, update) for slot in places]
        return torch.stack([torch.stack(row) for row in zip(*found, strict=True)])
