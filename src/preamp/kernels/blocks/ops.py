# SPDX-License-Identifier: BSD-3-Clause
"""Every op of the table on blocks.

Update rules take torch's fused kernels where a rule is theirs, else the reference's formulas. On a
CPU small gradients are joined and read as one; on other devices torch has kernels that read many
tensors at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import dtype_of, host_reaches
from preamp.kernels import stored as formats
from preamp.kernels.blocks.cut import (
    REFERENCE,
    Block,
    Cut,
    Plan,
    Sizes,
    Workspace,
    blocks_of,
    by_dtype,
    copy_,
    copy_where_wanted,
    flatten,
    plan_of,
    regular,
    split,
)
from preamp.kernels.ops import Census, Column, Ops, Tensors
from preamp.kernels.places import (
    STORED_DTYPES,
    check_lengths,
    check_shapes,
    check_stored,
    geometry_of,
    shapes_of,
)
from preamp.kernels.reference.formulas import apply, measured, number_of, order_of
from preamp.kernels.reference.update import Slot
from preamp.kernels.rules import AdagradRule, AdamRule, BiasCorrection, LambRule, Rule, SgdRule
from preamp.kernels.update import Scalar, Update, norms_at
from preamp.kernels.vectors import cat, norm, norms_of, stack

_torch: Any = torch
_CPU = torch.device("cpu")
_SIZES = Sizes()
_SMALL = 1 << 16
"""Elements up to which joining tensors costs less than calls of their own."""
_PARAM, _GRAD, _STATE = 0, 1, 2  # columns of an update
_BESIDE = -1  # the last one: halves, or what is beside packed parameters, which are halves

Fused = Callable[[Sequence[Any], Sequence[Any], Sequence[Sequence[Any]]], None]
"""A kernel of torch's on parameters, gradients and state."""


class Blocks(Ops):
    """Every op in blocks.

    ``reads``: whether values on a CPU may be read; else it is treated as any other device.
    """

    name = "blocks"

    def __init__(self, sizes: Sizes = _SIZES, *, reads: bool = True) -> None:
        self._sizes = sizes
        self._reads = reads

    def _is_near(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has the memory of a CPU, which is read at once."""
        return self._reads and host_reaches(tensor)

    def _small(self, *, near: bool) -> int:
        """Elements of a block where a computation makes temporaries."""
        return self._sizes.small * torch.get_num_threads() if near else self._sizes.joined

    def _large(self, *, near: bool) -> int:
        """Elements of a block where it makes none."""
        if not near:
            return self._sizes.joined
        return max(self._sizes.large * torch.get_num_threads(), self._sizes.large_at_least)

    # -- scaling, adding, casting ----------------------------------------------------------------

    @torch.no_grad()
    def scale_add_(self, grads: Tensors, factor: Scalar, addends: Column) -> None:
        check_lengths(grads, addends)
        columns, odd = regular(grads, addends)
        if odd:
            REFERENCE.scale_add_([grads[i] for i in odd], factor, [addends[i] for i in odd])
        for targets, others in by_dtype(*columns):
            dtype = math_dtype(targets[0].dtype)
            by = _beside(factor, targets[0], dtype)
            if targets[0].dtype is dtype and others[0] is None:
                self._multiply_(targets, by)
                continue
            for block in self._blocks(dtype, targets, others):
                wide = block.flat(0, dtype) * by
                if others[0] is not None:
                    wide += block.flat(1, dtype)
                block.write(0, wide)

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        check_lengths(halves, factors, addends)
        if any(half.layout is not torch.strided for half in halves):
            return REFERENCE.widen_add(halves, factors, addends)
        kept = torch.preserve_format
        wide = [torch.empty_like(h, dtype=torch.float32, memory_format=kept) for h in halves]
        if not wide:
            return []
        copy_(wide, halves)
        if len(set(map(id, factors))) == 1:
            self._multiply_(wide, factors[0].to(wide[0].device))
        else:
            by = [factor.to(w.device) for factor, w in zip(factors, wide, strict=True)]
            _torch._foreach_mul_(wide, by)
        pairs = [(a, w) for a, w in zip(addends, wide, strict=True) if a is not None]
        if pairs:
            _torch._foreach_add_([a for a, _ in pairs], [w for _, w in pairs])
        return [w if a is None else a for a, w in zip(addends, wide, strict=True)]

    @torch.no_grad()
    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        if targets:
            copy_(targets, sources)

    split_: Any = REFERENCE.split_
    join_: Any = REFERENCE.join_
    tally: Any = REFERENCE.tally

    @torch.no_grad()
    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        check_lengths(targets, xs, ys)
        columns, odd = regular(targets, xs, ys)
        if odd:
            outs, ins = ([column[i] for i in odd] for column in (targets, xs))
            REFERENCE.axpby_(outs, a, ins, b, [ys[i] for i in odd])
        for outs, ins, others in by_dtype(*columns):
            x_dtype = math_dtype(ins[0].dtype)
            y_dtype = x_dtype if others[0] is None else math_dtype(others[0].dtype)
            by_x, by_y = _beside(a, outs[0], x_dtype), _beside(b, outs[0], y_dtype)
            for block in self._blocks(x_dtype, outs, ins, others):
                wide = block.flat(1, x_dtype) * by_x
                if others[0] is not None:
                    wide = wide + block.flat(2, y_dtype) * by_y
                block.write(0, wide)

    def _multiply_(self, tensors: Tensors, by: Scalar) -> None:
        """Multiply dense tensors of one dtype, that of the factor."""
        is_tensor = isinstance(by, torch.Tensor) and by.dtype is torch.float32
        if is_tensor and tensors[0].dtype is torch.float32 and self._is_near(tensors[0]):
            # On a CPU a quarter of the time of `_foreach_mul_`; what it finds is not looked at.
            found = torch.zeros((), dtype=torch.float32, device="cpu")
            _torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, by)
            torch.autograd.graph.increment_version(tensors)  # which it does not tell autograd of
        else:
            _torch._foreach_mul_(tensors, by)

    def _blocks(self, dtype: torch.dtype, leaders: Tensors, *columns: Column) -> Iterator[Block]:
        """The blocks of some lists; those of `dtype` are joined in memory that is kept."""
        near, every = self._is_near(leaders[0]), (leaders, *columns)
        plan = plan_of(shapes_of(leaders), self._large(near=near))
        with plan.workspaces(dtype, len(every) if near else 0) as spaces:
            for cut in plan.cuts:
                yield from blocks_of(plan, cut, every, spaces)

    # -- what is read and not written ------------------------------------------------------------

    @torch.no_grad()
    def census(
        self,
        grads: Tensors,
        device: torch.device,
        *,
        with_norm: bool = False,
        with_max_abs: bool = True,
    ) -> Census:
        """See `preamp.kernels.ops.Ops.census`.

        On a CPU it is looked for which tensors an overflow is in only where there is one.
        """
        if not self._are_near(grads):
            return self._census_of_far(grads, device, with_norm=with_norm)
        norm = self.l2norm(grads, [None] * len(grads), _CPU) if with_norm else None
        if norm is not None and math.isfinite(norm.item()):
            found_inf = torch.zeros((), dtype=torch.float32, device=_CPU)  # no need to look further
        else:
            column, odd = _regular(grads)
            found_inf = self._found_inf(column)
            if odd:
                rest = REFERENCE.census([grads[i] for i in odd], _CPU)
                found_inf = torch.maximum(found_inf, rest.found_inf)
        max_abs = None
        if with_max_abs or found_inf.item() != 0:
            max_abs = REFERENCE.census(grads, device).max_abs
        return Census(found_inf.to(device), None if norm is None else norm.to(device), max_abs)

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        if self._are_near(tensors):
            return self._norms_of_each(tensors, factor).to(device)
        places, others = _sort(tensors)
        norms = torch.zeros(len(tensors), dtype=torch.float32, device=device)
        for dtype, own in places.items():
            values, wide = [tensors[place] for place in own], math_dtype(dtype)
            if factor is not None:
                by = factor.to(values[0].device)
                values = _torch._foreach_mul([value.to(wide) for value in values], by)
            _put(norms, own, norms_of(values, dtype=wide))
        if others:
            rest = REFERENCE.l2norms([tensors[place] for place in others], factor, device)
            _put(norms, others, rest.unbind())
        return norms

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        if not self._are_near(tensors):
            norms = self.l2norms(tensors, None, device)
            if any(factor is not None for factor in factors):
                one = torch.ones((), dtype=torch.float32, device=device)
                norms = norms * stack([one if by is None else by.to(device) for by in factors])
            return norm(norms)
        totals: list[torch.Tensor] = []
        for factor, own in _by_factor(tensors, factors):
            column, odd = _regular(own)
            found = self._norms_in_order(column)
            found += [REFERENCE.l2norms([own[i] for i in odd], None, _CPU)] if odd else []
            total = _total(found)
            totals.append(total if factor is None else total * factor.to(_CPU))
        return _total(totals).to(device)

    def _are_near(self, tensors: Tensors) -> bool:
        return self._is_near(tensors[0]) if tensors else self._reads

    # -- on a CPU ------------------------------------------------------------------------------

    def _joined(self, column: Tensors, *, widens: bool = False) -> Iterator[torch.Tensor]:
        """Contiguous tensors by dtype, small ones joined (in float32 if ``widens``), no empty ones.

        Each is valid until the next.
        """
        geometry = geometry_of(column)
        if geometry is None:  # there are none
            return
        plans = _reading_plans(geometry.shapes, geometry.leaders, self._large(near=True))
        for dtype, plan in plans:
            with plan.workspaces(math_dtype(dtype) if widens else dtype) as (space,):
                for cut in plan.cuts:
                    tensors = cut.of(column)
                    if len(tensors) == 1:
                        yield tensors[0].view(-1)
                    else:
                        copy_(space.views(cut.index), tensors)
                        yield space.memory[: cut.numel]

    def _found_inf(self, column: Tensors) -> torch.Tensor:
        """1.0 if there is an infinite value or nan; nan is both the smallest and the largest."""
        ends = [end for tensor in self._joined(column) for end in torch.aminmax(tensor)]
        return (~torch.isfinite(_stack(ends)).all()).float()

    def _norms_in_order(self, column: Tensors) -> list[torch.Tensor]:
        """Norms that together are the norm of all."""
        joined = self._joined(column, widens=True)
        return [found for tensor in joined for found in self._pieces(tensor)]

    def _pieces(
        self, tensor: torch.Tensor, factor: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Norms of a tensor or of pieces of it, multiplied by ``factor`` before."""
        dtype = math_dtype(tensor.dtype)
        if factor is None and dtype is tensor.dtype:
            yield norm(tensor)
            return
        # torch would widen a half tensor as a whole, into memory that it asks for each time.
        most = self._large(near=True)
        with plan_of((torch.Size((most,)),), most).workspaces(dtype) as (space,):
            for piece in split(tensor, most):
                values = space.memory[: piece.numel()].copy_(piece)
                yield norm(values if factor is None else values.mul_(factor))

    def _norms_of_each(self, tensors: Tensors, factor: torch.Tensor | None) -> torch.Tensor:
        factor = None if factor is None else factor.to(_CPU)
        column, odd = _regular(tensors)
        kinds = set(map(dtype_of, column))
        if factor is None and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}:
            norms = stack(norms_of(column)).float()
        else:
            norms = _stack([_total(list(self._pieces(tensor, factor))) for tensor in column])
        if odd:
            more = REFERENCE.l2norms([tensors[i] for i in odd], factor, _CPU)
            norms, kept = norms.new_empty(len(tensors)), norms
            is_odd = torch.zeros(len(tensors), dtype=torch.bool, device=_CPU)
            is_odd[odd] = True
            norms[is_odd], norms[~is_odd] = more, kept
        return norms

    # -- on other devices ----------------------------------------------------------------------

    def _census_of_far(self, grads: Tensors, device: torch.device, *, with_norm: bool) -> Census:
        """The largest magnitudes are how an overflow is found."""
        places, others = _sort(grads)
        has_float64 = any(grad.dtype is torch.float64 for grad in grads)
        wide = torch.float64 if has_float64 else torch.float32
        max_abs = torch.zeros(len(grads), dtype=wide, device=device)
        for dtype, own in places.items():
            values = [grads[place] for place in own]
            _put(max_abs, own, _torch._foreach_norm(values, math.inf, math_dtype(dtype)))
        found_inf = 1.0 - torch.isfinite(max_abs).all().float()
        if others:
            rest = REFERENCE.census([grads[place] for place in others], device)
            found_inf = torch.maximum(found_inf, rest.found_inf)
            if rest.max_abs is not None:
                _put(max_abs, others, rest.max_abs.unbind())
        total = self.l2norm(grads, [None] * len(grads), device) if with_norm else None
        return Census(found_inf=found_inf, norm=total, max_abs=max_abs.float())

    # -- update rules -----------------------------------------------------------------------------

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        if not params:
            return
        is_near = self._is_near(params[0])
        if is_near and update.found_inf is not None:
            if update.found_inf.item() != 0:
                return
            update = replace(update, found_inf=None)
        if _has_fewer_bits(params, state, update):
            REFERENCE.update_(params, grads, *state, rule=rule, update=update)
            return
        work = Work(rule, update, params, grads, *state)
        if work.odd:
            lists = ([column[i] for i in work.odd] for column in (params, grads, *state))
            REFERENCE.update_(*lists, rule=rule, update=update.at(work.odd))
        if not work.columns[_PARAM]:
            return
        fused = fused_kernel(rule, update) if is_near and work.is_wide else None
        makes_none = fused is not None and not work.is_packed
        plan = work.plan(self._large(near=is_near) if makes_none else self._small(near=is_near))
        if fused is not None:
            _run_fused(work, plan, fused)
        else:
            _run_formula(work, plan, is_near)

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        if _has_fewer_bits(params, state, update):
            return REFERENCE.lamb_norms(params, grads, *state, rule=rule, update=update)
        rule = replace(rule, uses_trust_ratio=True)
        work = Work(rule, update, params, grads, *state)
        if work.odd:
            return REFERENCE.lamb_norms(params, grads, *state, rule=rule, update=update)
        found = torch.zeros(2, len(params), dtype=work.dtype, device=params[0].device)
        plan = work.plan(self._small(near=self._is_near(params[0])))
        for cut in plan.cuts:
            norms = work.measured(blocks_of(plan, cut, work.columns))
            for row, values in zip(found, norms, strict=True):
                copy_([row[place] for place in cut.places], values.unbind())
        return found


def _has_fewer_bits(params: Tensors, state: Sequence[Tensors], update: Update) -> bool:
    """Whether state is kept in fewer bits; refuses what does not fit together."""
    check_stored(params, state, update)
    return update.stored is not None and {*update.stored.formats} - {formats.Format.PLAIN} != set()


def _beside(factor: Scalar, tensor: torch.Tensor, dtype: torch.dtype) -> Scalar:
    return factor.to(tensor.device, dtype) if isinstance(factor, torch.Tensor) else factor


@functools.lru_cache(maxsize=32)
def _reading_plans(
    shapes: tuple[torch.Size, ...], kinds: tuple[torch.dtype, ...], large: int
) -> list[tuple[torch.dtype, Plan]]:
    """Plans by dtype; ``kinds`` has the dtype of each tensor, or one for all."""
    cuts: dict[torch.dtype, list[Cut]] = {}
    together: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        own = tuple(together[dtype])
        numel = sum(shapes[place].numel() for place in own)
        before = cuts.setdefault(dtype, [])
        before.append(Cut(own, numel, sum(cut.index >= 0 for cut in before)))

    for place, (shape, dtype) in enumerate(zip(shapes, itertools.cycle(kinds), strict=False)):
        size = shape.numel()
        if size > _SMALL:
            cuts.setdefault(dtype, []).append(Cut((place,), size, -1))
        elif size:
            if size > room.get(dtype, 0):
                if dtype in together:
                    close(dtype)
                together[dtype], room[dtype] = [], large
            together[dtype].append(place)
            room[dtype] -= size
    for dtype in together:
        close(dtype)
    # Large tensors are read where they are, so no workspace needs room for pieces of them.
    return [(dtype, Plan(shapes, own, 0)) for dtype, own in cuts.items()]


def _regular(tensors: Tensors) -> tuple[Tensors, list[int]]:
    """See `regular`."""
    if geometry_of(tensors) is not None:
        return tensors, []
    (column,), odd = regular(tensors)
    return column, odd


def _by_factor(tensors: Tensors, factors: Column) -> list[tuple[torch.Tensor | None, Tensors]]:
    """The tensors of each factor."""
    if tensors and all(map(operator.is_, factors, itertools.repeat(factors[0]))):
        return [(factors[0], tensors)]
    sorted_: dict[int, tuple[torch.Tensor | None, list[torch.Tensor]]] = {}
    for tensor, factor in zip(tensors, factors, strict=True):
        sorted_.setdefault(id(factor), (factor, []))[1].append(tensor)
    return list(sorted_.values())


def _sort(tensors: Tensors) -> tuple[dict[torch.dtype, list[int]], list[int]]:
    """Where the tensors of each dtype stand, and those of other kinds; empty ones are left out."""
    places: dict[torch.dtype, list[int]] = {}
    others: list[int] = []
    for place, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_complex():
            others.append(place)
        elif tensor.numel():
            places.setdefault(tensor.dtype, []).append(place)
    return places, others


def _put(target: torch.Tensor, places: list[int], values: Sequence[torch.Tensor]) -> None:
    """Write scalars to ``places``; an index would have to be copied to the device."""
    copy_([target[place] for place in places], values)


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of scalars of any float dtype, on the CPU."""
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:  # finite float64 values may lie beyond float32's range
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        values = [value.to(wide) for value in values]
    return stack(list(values)) if values else torch.zeros(0, dtype=torch.float32, device=_CPU)


def _total(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    values = _stack([value for norm in norms for value in norm.reshape(-1).unbind()])
    return norm(values).float()


class Work:
    """The lists of one update, with what cannot be walked through in blocks taken out."""

    def __init__(
        self, rule: Rule, update: Update, params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Sort; nothing is written."""
        self.rule, self.update = rule, update
        self.dtype = math_dtype(params[0].dtype)  # of the computation
        # State of one number for each parameter, if the rule has any
        self.numbers: list[torch.Tensor] = []
        if rule.has_numbers:
            self.numbers, state = list(state[-1]), state[:-1]
            check_lengths(params, self.numbers)
        lows = None if update.stored is None else update.stored.lows
        self.is_packed = lows is not None  # parameters are half tensors then
        beside: Column | None = lows or update.halves
        codes = STORED_DTYPES if lows else frozenset[torch.dtype]()
        given: tuple[Column, ...] = (params, grads, *state, beside or [None] * len(params))
        self._norms = update.norms
        geometry = geometry_of(*(given if beside else given[:_BESIDE]), codes=codes)
        if geometry is not None:
            # Parameters, gradients, state of their shapes …, `_BESIDE`; what was left out.
            self.columns, self.odd, self._shapes = given, list[int](), geometry.shapes
            kinds: Sequence[set[torch.dtype]] = geometry.dtypes
        else:
            check_lengths(*given)
            shapes = check_shapes(*given)
            self.columns, self.odd = regular(*given, codes=codes)
            self._shapes = shapes if self.columns is given else shapes_of(self.columns[_PARAM])
            kinds = [set(map(dtype_of, column)) for column in self.columns[:_BESIDE]]
        # Those of the lists that the kernels of torch write, of which packed parameters are none
        wide = kinds[_STATE : _STATE + len(state)]
        if not self.is_packed:
            wide = [kinds[_PARAM], *wide]
        # Whether parameters and state have it
        self.is_wide = all(dtypes == {self.dtype} for dtypes in wide)
        if self.odd:
            odd = set(self.odd)
            kept = [place for place in range(len(params)) if place not in odd]
            self._norms = norms_at(update.norms, kept)
            self.numbers = [n for place, n in enumerate(self.numbers) if place not in odd]

    def plan(self, most: int) -> Plan:
        """How the columns are cut into blocks of so many elements."""
        return plan_of(self._shapes, most)

    def norms(self, places: Sequence[int], blocks: list[Block]) -> Sequence[torch.Tensor]:
        """The norms of a cut's tensors that the rule needs, a vector each: given, or measured."""
        given = self.given_norms(places)
        return self.measured(blocks) if given is None else given.unbind()

    def given_norms(self, places: Sequence[int]) -> torch.Tensor | None:
        """``update.norms`` of some tensors, if the rule has been told them."""
        norms = norms_at(self._norms, places)
        return None if norms is None else norms.to(self.dtype)

    def measured(self, blocks: list[Block]) -> list[torch.Tensor]:
        """The same, measured."""
        order = order_of(self.rule)
        found: list[tuple[torch.Tensor, ...]] = []
        for block in blocks:
            slot = BlockSlot(block, self.dtype, self.update)
            values = measured(slot, self.rule, self.update.step)
            found.append(tuple(slot.norms(value, order) for value in values))
        if len(found) == 1:
            return list(found[0])
        # Several blocks are those of one tensor.
        return [stack(norms_of([cat(pieces)], order)) for pieces in zip(*found, strict=True)]

    def store_numbers(self, own: Sequence[torch.Tensor], values: Any) -> None:
        """Round a vector into 0-dim tensors."""
        if self.update.found_inf is not None:
            skips = self.update.found_inf.to(values.device) != 0
            before = stack(own)  # as they are stored: rounding a widened nan may change its bits
            values = torch.where(skips, before, values.to(before.dtype))
        copy_(own, values.unbind())


def _run_formula(work: Work, plan: Plan, is_near: bool) -> None:
    """Apply the reference's formula to one block after the other."""
    rule, update = work.rule, work.update
    lr = rule.lr
    if isinstance(lr, torch.Tensor):
        lr = lr.to(work.columns[_PARAM][0].device, work.dtype)
    if rule.has_numbers:
        for place, shape in enumerate(shapes_of(work.columns[_PARAM])):
            if shape.numel() == 0:  # in no block; its norm is zero and may be the first one
                number, given = work.numbers[place], work.given_norms([place])
                norms = [number.new_zeros(1) if given is None else given[0]]
                kept = number.to(work.dtype)
                work.store_numbers([number], number_of(rule, lr, norms, kept))

    def run(spaces: Sequence[Workspace]) -> None:
        for cut in plan.cuts:
            blocks = blocks_of(plan, cut, work.columns, spaces)
            own = [work.numbers[place] for place in cut.places] if work.numbers else []
            kept = stack(own).to(work.dtype) if own else None
            norms = work.norms(cut.places, blocks) if rule.takes_norms else ()
            number = number_of(rule, lr, norms, kept)
            for block in blocks:
                slot = BlockSlot(block, work.dtype, update)
                apply(slot, rule, update.step, block.spread(number))
            if own:
                work.store_numbers(own, number)

    if is_near:
        with plan.workspaces(work.dtype, len(work.columns)) as spaces:
            run(spaces)
    else:
        run(())


def _run_fused(work: Work, plan: Plan, fused: Fused) -> None:
    """Apply a kernel of torch's to one block after the other, and round the halves."""
    inv_scale = work.update.inv_scale
    if inv_scale is not None:
        inv_scale = inv_scale.to("cpu", work.dtype)
    is_half = work.columns[_GRAD][0].dtype is not work.dtype
    with plan.workspaces(work.dtype) as (space,):
        for cut in plan.cuts:
            for block in blocks_of(plan, cut, work.columns):
                params, grads, *state, beside = block.columns
                if inv_scale is not None or is_half:
                    grads = _wide_gradients(block, cut.index, space, inv_scale)
                if work.is_packed:
                    wide = _unpacked(block)
                    fused(block.split(wide), grads, state)
                    _pack(block, wide)
                    continue
                fused(params, grads, state)
                copy_where_wanted(beside, params)
            # torch's fused kernels do not tell autograd that they write.
            written = work.columns[_STATE:_BESIDE]
            for column in written if work.is_packed else (work.columns[_PARAM], *written):
                torch.autograd.graph.increment_version(cut.of(column))


def _unpacked(block: Block) -> torch.Tensor:
    """The values of packed parameters as one vector, in memory of its own."""
    return formats.join(flatten(block.columns[_PARAM]), flatten(block.columns[_BESIDE]))


def _pack(block: Block, wide: torch.Tensor) -> None:
    """Let packed parameters have the values of a vector."""
    half, low = formats.split(wide, block.columns[_PARAM][0].dtype)
    block.write(_PARAM, half)
    block.write(_BESIDE, low)


def _wide_gradients(
    block: Block, index: int, space: Workspace, inv_scale: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """Unscaled wide gradients for torch's fused kernels, in ``space`` until the next block."""
    grads = block.columns[_GRAD]
    if index >= 0:
        views = space.views(index)
        copy_(views, grads)
        wide = space.memory[: block.numel]
    else:
        wide = space.memory[: block.numel]
        views = [wide.view(grads[0].shape)]
        if inv_scale is not None and grads[0].dtype is wide.dtype:
            torch.mul(grads[0], inv_scale, out=views[0])
            return views
        copy_(views, grads)
    if inv_scale is not None:
        wide.mul_(inv_scale)
    return views


def fused_kernel(rule: Rule, update: Update) -> Fused | None:
    """The kernel of torch's that computes ``rule`` on a CPU, if there is one."""
    if isinstance(rule, AdamRule):
        if rule.eps_inside_sqrt or rule.bias_correction is BiasCorrection.STEP_SIZE:
            return None
        op = _torch._fused_adamw_ if rule.decoupled else _torch._fused_adam_
        # At step infinity the corrections 1 - beta**step are 1.
        corrects = rule.bias_correction is BiasCorrection.MOMENTS
        step = _constant(number(update.step) if corrects else math.inf)
        options = {
            **{"lr": number(rule.lr), "beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.eps},
            **{"weight_decay": rule.weight_decay, "amsgrad": False, "maximize": False},
        }
        return lambda p, g, s: op(p, g, *s, [], [step] * len(p), **options)
    if isinstance(rule, SgdRule) and not rule.decays_after_momentum:
        options = {
            **{"lr": number(rule.lr), "weight_decay": rule.weight_decay, "momentum": rule.momentum},
            **{"dampening": rule.dampening, "nesterov": rule.nesterov, "maximize": False},
            "is_first_step": rule.momentum != 0 and number(update.step) == 1,
        }
        return lambda p, g, s: _torch._fused_sgd_(p, g, s[0] if rule.momentum else [], **options)
    if isinstance(rule, AdagradRule) and not (rule.decoupled and rule.weight_decay != 0):
        step = _constant(1.0)  # of no consequence: it only counts for a decay of the learning rate
        options = {
            **{"lr": number(rule.lr), "lr_decay": 0.0, "weight_decay": rule.weight_decay},
            **{"eps": rule.eps, "maximize": False},
        }
        return lambda p, g, s: _torch._fused_adagrad_(p, g, *s, [step] * len(p), **options)
    return None


def _constant(value: float) -> torch.Tensor:
    """A number as torch's fused kernels take the step, whatever the default dtype and device."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def number(value: Scalar) -> float:
    """A hyper-parameter as a number."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


class BlockSlot(Slot):
    """A block as the reference's formulas take it."""

    def __init__(self, block: Block, dtype: torch.dtype, update: Update) -> None:
        """Load; nothing is written before `store`."""
        self._block = block
        self._found_inf = update.found_inf
        self._is_packed = update.stored is not None and update.stored.lows is not None
        self.p = _unpacked(block) if self._is_packed else block.flat(_PARAM, dtype)
        self.g = block.flat(_GRAD, dtype)
        if update.inv_scale is not None:
            self.g = self.g * self.scalar(update.inv_scale)
        states = range(_STATE, len(block.columns) - 1)
        self.state = tuple(block.flat(column, dtype) for column in states)

    def norms(self, values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        """The norm of each of the block's tensors, of which ``values`` has the elements."""
        return stack(norms_of(self._block.split(values), order))

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """See `Slot.store`."""
        for column, values in enumerate(state, _STATE):
            self._write(column, values)
        if self._is_packed:
            half, low = formats.split(p, self._block.columns[_PARAM][0].dtype)
            self._write(_PARAM, half)
            self._write(_BESIDE, low)
            return
        self._write(_PARAM, p)
        self._copy_to_halves()

    def _write(self, column: int, values: torch.Tensor) -> None:
        if self._found_inf is not None:
            # As it is stored: rounding a widened nan may change its bits.
            before = flatten(self._block.columns[column])
            values = torch.where(self._skips(), before, values.to(before.dtype))
        self._block.write(column, values)

    def _copy_to_halves(self) -> None:
        params, halves = self._block.columns[_PARAM], self._block.columns[_BESIDE]
        kinds = {None if half is None else half.dtype for half in halves}
        if self._found_inf is None:
            copy_where_wanted(halves, params)
        elif len(kinds) == 1 and None not in kinds:
            self._write(_BESIDE, flatten(params).to(halves[0].dtype))
        else:
            for half, param in zip(halves, params, strict=True):
                if half is not None:
                    half.copy_(torch.where(self._skips(), half, param.to(half.dtype)))

    def _skips(self) -> torch.Tensor:
        flag = cast("torch.Tensor", self._found_inf)
        return flag.to(self.p.device) != 0
