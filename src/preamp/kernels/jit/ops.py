# SPDX-License-Identifier: BSD-3-Clause
"""Every op of the table: what each kernel is called with, and what becomes of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from preamp.kernels.jit import formulas, loops
from preamp.kernels.jit.formats import FORMATS, SPLITS, Layout
from preamp.kernels.jit.loops import Chunks, blocks_in, chunks_of, in_blocks, walk
from preamp.kernels.jit.words import CODES, ZEROS
from preamp.kernels.ops import Census, Column, Tensors
from preamp.kernels.places import (
    STORED_DTYPES,
    Combining,
    Group,
    addresses,
    check_lengths,
    check_shapes,
    check_stored,
    geometry_of,
    pick,
    shapes_of,
    sort,
)
from preamp.kernels.plain import Plain
from preamp.kernels.plain.formulas import number_of
from preamp.kernels.rules import LambRule, LarsRule, NovoGradRule, Rule
from preamp.kernels.stored import Format, Stored, join, lead
from preamp.kernels.update import Scalar, Update, norms_at
from preamp.kernels.vectors import norms_of

_PLAIN = Plain(fuses=False)
_CPU = torch.device("cpu")
_torch: Any = torch
_MOST = torch.finfo(torch.float32).max


class Part(NamedTuple):
    """Places that one launch takes: in each list one dtype, or no tensors at all."""

    rows: list[Sequence[torch.Tensor]]  # the lists; empty ones have no tensors
    dtypes: list[torch.dtype | None]  # of each
    places: Sequence[int]  # which places of the caller's lists these are
    chunks: Chunks
    at: np.ndarray  # address of each tensor in each list

    def walk(self, kernel: Any, *arguments: Any, kinds: Sequence[int] = ()) -> None:
        """Call a kernel on all lists; ``kinds`` are their codes where not their dtypes'."""
        codes = _codes(*(kinds or map(CODES.__getitem__, self.dtypes)))
        walk(kernel, self.chunks, self.rows, self.at, codes, *arguments)

    def read(self, kernel: Any, row: int, *arguments: Any) -> None:
        """Call a kernel on one list."""
        chosen = slice(row, row + 1)
        walk(kernel, self.chunks, self.rows[chosen], self.at[chosen], *arguments)


@lru_cache(maxsize=64)
def _codes(*codes: int) -> np.ndarray:
    """For kernels, which only read them."""
    return np.array(codes)


def parts_of(
    *columns: Column, codes: Set[torch.dtype] = frozenset(), in_order: bool = False
) -> tuple[list[Part], list[int]]:
    """Sort lists into launches, and name the places that no kernel can walk; see `sort`."""
    groups, others = sort(*columns, codes=codes, in_order=in_order)
    parts: list[Part] = []
    for group in groups:
        part = _part(group) if group.device.type == "cpu" else None
        if part is None:
            others += group.positions
        else:
            parts.append(part)
    return parts, sorted(others)


def _part(group: Group) -> Part | None:
    """``None`` if a tensor has no memory: freed, or of one of torch's transforms."""
    rows = [*group.rows]
    try:
        at = addresses(rows)
    except RuntimeError:
        return None
    chunks = chunks_of(rows, group.alike.shapes if group.alike else None)
    filled = sum(map(bool, rows))
    if np.count_nonzero(at) < filled * len(rows[0]):
        used = at[:, chunks.table[0]]  # the address of an empty tensor is 0
        if np.count_nonzero(used) < filled * used.shape[1]:
            return None
    return Part(rows, [*group.dtypes], group.positions, chunks, at)


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


def _vector(values: Scalar, part: Part) -> np.ndarray:
    """One number for each tensor."""
    if not isinstance(values, torch.Tensor) or values.numel() == 1:
        return np.full(part.chunks.count, _number(values))
    check_lengths(part.rows[0], cast("Any", values))
    return values.detach().to(_CPU, torch.float32).contiguous().numpy()


class Jit(Combining):
    """Every op in kernels that numba compiles."""

    name = "jit"
    plain = _PLAIN

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

        With a norm, single values are looked at only if the norm is not finite, and the largest
        finite ones of each tensor only if there is an overflow or they were asked for.
        """
        parts, others = parts_of(grads)
        if not parts:
            options = {"with_norm": with_norm, "with_max_abs": with_max_abs}
            return _PLAIN.census(grads, device, **options)
        rest = _PLAIN.census(pick(grads, others), _CPU) if others else None
        norm = largest = finite = None
        tops: list[tuple[np.ndarray, np.ndarray]] = []
        is_finite = with_norm
        if with_norm:
            norms = _norms_of(grads, parts, others)
            is_finite = bool(np.isfinite(norms).all())
            norm = _scalar(_norm(norms), device)
        if with_max_abs or not is_finite:
            tops = [_largest(part, finite=with_max_abs) for part in parts]
            is_finite = all([np.isfinite(top).all() for top, _ in tops])
        if rest is not None and rest.found_inf.item() != 0:
            is_finite = False
        if not is_finite and not with_max_abs:  # the finite ones were not asked for, but are now
            tops = [_largest(part, finite=True) for part in parts]
        if with_max_abs or not is_finite:
            largest, finite = np.zeros(len(grads)), np.zeros(len(grads))
            for part, found in zip(parts, tops, strict=True):
                largest[part.places], finite[part.places] = (_highest(part, top) for top in found)
            if rest is not None and rest.max_abs is not None:
                largest[others], finite = rest.max_abs.numpy(), None
        found_inf = _scalar(float(not is_finite), device)
        return Census(found_inf, norm, _float32(largest, device), _float32(finite, device))

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        parts, others = parts_of(tensors)
        if not parts:
            return _PLAIN.l2norms(tensors, factor, device)
        norms = _norms_of(tensors, parts, others, factor)
        return cast("torch.Tensor", _float32(norms, device))

    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        check_lengths(tensors, factors)
        parts, others = parts_of(tensors)
        if not parts:
            return _PLAIN.l2norm(tensors, factors, device)
        norms, numbers = _norms_of(tensors, parts, others), _numbers(factors)
        if len({*numbers.values()}) == 1:  # as a rule: one backward, one factor, or a scale of 1
            if (by := next(iter(numbers.values()))) != 1.0:
                norms = norms * by
        elif numbers:
            norms = norms * np.array([numbers[id(factor)] for factor in factors])
        return _scalar(_norm(norms), device)

    tally: Any = _PLAIN.tally

    # -- scaling, adding, casting: see `Combining` ------------------------------------------------

    def _groups(
        self, *columns: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[list[Part], list[int]]:
        return parts_of(*columns, codes=codes)

    def _combine(
        self, group: Part, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        if factors:
            numbers = _numbers(factors)
            each = np.array([numbers[id(factors[place])] for place in group.places], np.float32)
        else:
            each = _vector(a, group)
        is_copy = not factors and isinstance(a, float) and a == 1.0 and not group.rows[2]
        group.walk(loops.combine, each, _number(b), is_copy)
        torch.autograd.graph.increment_version(group.rows[0])

    def _take_over(self, group: Part) -> None:
        group.walk(loops.take_over_lists)
        torch.autograd.graph.increment_version(group.rows[0])

    def _convert(self, group: Part, *, joins: bool) -> None:
        kernel = loops.join_lists if joins else loops.split_lists
        half = ZEROS[cast("torch.dtype", group.dtypes[1])]
        low = np.int16(0) if group.rows[2] else None
        walk(kernel, group.chunks, group.rows, group.at, half, low)
        written = group.rows[:1] if joins else group.rows[1:]
        torch.autograd.graph.increment_version([*chain.from_iterable(written)])

    # -- update rules -----------------------------------------------------------------------------

    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        works, others = _works(params, grads, *state, rule=rule, update=update)
        if update.found_inf is not None and _plain(update.found_inf) != 0:
            return
        for work in works:
            work.start(formulas.record_of(work, rule), formulas.number_of(work, rule))
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            taken = replace(update, found_inf=None)
            _PLAIN.update_(*lists, rule=rule, update=taken.at(others))

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        works, others = _works(params, grads, *state, rule=rule, update=update)
        if others or len(works) != 1:
            return _PLAIN.lamb_norms(params, grads, *state, rule=rule, update=update)
        works[0].take_over()
        return _lamb_norms(works[0], rule)


# -- measuring ------------------------------------------------------------------------------------


def _norms_in(part: Part, row: int, factor: torch.Tensor | None) -> np.ndarray:
    """The norm of each tensor × ``factor`` in one list, float64."""
    by = _number(1.0 if factor is None else factor)
    sums = np.empty(part.chunks.table.shape[1])
    zero = ZEROS[cast("torch.dtype", part.dtypes[row])]
    part.read(loops.sum_squares, row, zero, by, sums)
    return np.sqrt(_by_tensor(part, sums))


def _largest(part: Part, row: int = 0, *, finite: bool) -> tuple[np.ndarray, np.ndarray]:
    """Per chunk the largest magnitude, nan above infinity, and the largest finite one, float64."""
    tops = np.zeros((2, part.chunks.table.shape[1]))
    zero = ZEROS[cast("torch.dtype", part.dtypes[row])]
    part.read(loops.find_largest, row, zero, finite, tops[0], tops[1])
    return tops[0], tops[1]


def _highest(part: Part, tops: np.ndarray) -> np.ndarray:
    """Of each tensor the largest of its chunks."""
    found = np.zeros(part.chunks.count)
    with np.errstate(invalid="ignore"):  # a nan stays
        np.maximum.at(found, part.chunks.table[0], tops)
    return found


def _by_tensor(part: Part, sums: np.ndarray) -> np.ndarray:
    return np.bincount(part.chunks.table[0], sums, part.chunks.count)


def _norms_of(
    tensors: Tensors,
    parts: Sequence[Part],
    others: Sequence[int],
    factor: torch.Tensor | None = None,
) -> np.ndarray:
    """The norm of each tensor × ``factor``, float64; ``parts`` and ``others`` from `parts_of`."""
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


def _numbers(factors: Column) -> dict[int, float]:
    """What each of the distinct ``factors`` says, by its ``id``; 1 for ``None``."""
    distinct = dict(zip(map(id, factors), factors, strict=True))
    return {key: 1.0 if by is None else _plain(by) for key, by in distinct.items()}


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    number = _number(value)
    if device.type == "cpu":  # elsewhere a copy would wait for the device
        return cast("torch.Tensor", _torch.from_numpy(np.array(number)))
    return torch.full((), float(number), dtype=torch.float32, device=device)


def _float32(values: np.ndarray | None, device: torch.device) -> torch.Tensor | None:
    if values is None:
        return None
    with np.errstate(over="ignore"):  # finite float64 values may lie beyond float32's range
        return cast("torch.Tensor", _torch.from_numpy(values.astype(np.float32)).to(device))


# -- updates --------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """The places of an update that one launch takes.

    Its lists are parameters, gradients, state, halves; with lists that are kept in fewer bits also
    lows, and scales of each list of state, where there are any.
    """

    part: Part
    update: Update
    lists: int  # parameters, gradients and state
    numbers: list[torch.Tensor]  # state of one number for each parameter, if the rule has any
    layout: Any = None  # of what is kept in fewer bits

    @property
    def inv_scale(self) -> Scalar:
        """What unscales the gradients."""
        return 1.0 if self.update.inv_scale is None else self.update.inv_scale

    @property
    def on_the_way(self) -> tuple[Any, Any]:
        """What stands for the dtypes of halves and lows that the update itself converts.

        Gradients and halves are, if all else has the computation's dtype; gradients, split
        parameters and lows always.
        """
        p, g, *state = self.part.dtypes[: self.lists]
        half = self.part.dtypes[self.lists]
        if self.update.stored is not None and self.update.stored.lows is not None:
            return (ZEROS[p], np.int16(0)) if p is not None and p == g else (None, None)
        is_usual = {p, *state} == {torch.float32} and g == half and self.leads
        return (ZEROS[half] if is_usual and half is not None else None), None

    @property
    def leads(self) -> bool:
        """Whether there are half weights, which parameters refine."""
        p, half = self.part.dtypes[0], self.part.dtypes[self.lists]
        return self.update.halves_lead and p is not None and half is not None and lead(p, half)

    @property
    def kinds(self) -> Sequence[int]:
        """The codes of the lists, if there are any that are kept in fewer bits."""
        stored = self.update.stored
        if stored is None:
            return ()
        dtypes = self.part.dtypes
        kinds = [CODES.get(dtype, 0) for dtype in dtypes[: self.lists + 1]]
        if stored.lows is not None:
            kinds[0] = SPLITS[cast("torch.dtype", dtypes[0])]
        for row, kind in enumerate(stored.formats[: self.lists - 2], 2):
            kinds[row] = FORMATS.get(kind, kinds[row])
        return kinds

    @property
    def step(self) -> int:
        """The number of the update."""
        step = self.update.step
        return int(step.item()) if isinstance(step, torch.Tensor) else step

    def correction(self, beta: float, *, wanted: bool) -> float:
        """``1 / (1 - beta ** step)``, or 1 for none."""
        left = 1.0 - beta**self.step if wanted else 1.0
        return 1.0 / left if left else math.inf

    def numbers_as(self, **values: Scalar) -> dict[str, Any]:
        """Numbers as kernels take them, by name."""
        return {
            name: np.float32(value)
            if value.__class__ is float and -_MOST <= value <= _MOST
            else _number(value)
            for name, value in values.items()
        }

    def start(self, rule: Any, each: Scalar) -> None:
        """Update by a record of `formulas`, with ``each`` for each tensor; note what is written."""
        by, numbers = _number(self.inv_scale), _vector(each, self.part)
        second = ZEROS[torch.float32] if isinstance(rule, formulas.Moments) else None
        half, low = self.on_the_way
        leads = self.leads and half is None
        given = half, low, second, self.layout, leads, by, numbers, rule
        self.part.walk(loops.update, *given, kinds=self.kinds)
        written = [row for place, row in enumerate(self.part.rows) if place != 1]
        torch.autograd.graph.increment_version([*chain.from_iterable(written)])

    def norms(self, rule: Rule) -> tuple[torch.Tensor, ...]:
        """The norms that the rule needs, given or measured."""
        given = norms_at(self.update.norms, self.part.places)
        if given is not None:
            return given.to(_CPU, torch.float32).unbind()
        self.take_over()
        if isinstance(rule, LambRule):
            return _lamb_norms(self, rule).unbind()
        factor = self.update.inv_scale
        if isinstance(rule, NovoGradRule) and rule.uses_max_norm:
            largest = _highest(self.part, _largest(self.part, 1, finite=False)[0])
            wide = _torch.from_numpy(largest).to(torch.float32)
            return (wide if factor is None else wide * factor.to(_CPU, torch.float32),)
        norms = _torch.from_numpy(_norms_in(self.part, 1, factor)).to(torch.float32)
        return (self._lengths(), norms) if isinstance(rule, LarsRule) else (norms,)

    def take_over(self) -> None:
        """Let parameters say what their half weights do, before norms are taken of them."""
        if self.leads:
            kinds = [CODES[self.part.dtypes[place]] for place in (0, self.lists)]
            own = self.part._replace(at=self.part.at[[0, self.lists]])
            own.walk(loops.take_over_lists, kinds=kinds)
            torch.autograd.graph.increment_version(self.part.rows[0])

    def _lengths(self) -> torch.Tensor:
        """The norms of the parameters."""
        stored, part = self.update.stored, self.part
        if stored is None or stored.lows is None:
            return _torch.from_numpy(_norms_in(part, 0, None)).to(torch.float32)
        pairs = zip(part.rows[0], pick(stored.lows, part.places), strict=True)
        return torch.stack(norms_of([join(half.detach(), low.detach()) for half, low in pairs]))

    @torch.no_grad()
    def numbers_of(self, rule: Rule) -> Scalar:
        """Of each tensor the number that the rule needs, see `number_of`; that of NovoGrad kept."""
        lr = rule.lr.to(_CPU, torch.float32) if isinstance(rule.lr, torch.Tensor) else rule.lr
        kept = _torch.stack(self.numbers).to(torch.float32) if self.numbers else None
        found = number_of(rule, lr, self.norms(rule) if rule.takes_norms else (), kept)
        if self.numbers:
            _torch._foreach_copy_(self.numbers, cast("torch.Tensor", found).unbind())
        return found


def _works(
    params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
) -> tuple[list[_Work], list[int]]:
    shaped = len(state) - rule.has_numbers
    numbers = state[shaped] if rule.has_numbers else ()
    halves: Column = [None] * len(params) if update.halves is None else update.halves
    kept = list(state[:shaped])
    if not kept or rule.leaves_state:  # kernels have a list for it
        kept = [[None] * len(params)]
    columns = (params, grads, *kept, halves)
    check_lengths(*columns, *([numbers] if rule.has_numbers else []))
    stored = update.stored
    if stored is not None:
        check_stored(params, state, update)
        if rule.leaves_state:
            stored = replace(stored, formats=(), scales=())
            update = replace(update, stored=stored)
    parts, others = parts_of(*columns) if stored is None else _stored_parts(columns, stored)
    if others or len(parts) != 1:
        check_shapes(*columns)
    return [
        _Work(
            part,
            update,
            len(kept) + 2,
            [numbers[place] for place in part.places] if rule.has_numbers else [],
            None if stored is None else _layout(part, stored, update.step),
        )
        for part in parts
    ], others


def _stored_parts(columns: Sequence[Column], stored: Stored) -> tuple[list[Part], list[int]]:
    """`parts_of` lists of which some are kept in fewer bits."""
    count = len(columns[0])
    lows: Column = [None] * count if stored.lows is None else stored.lows
    by_chance = any([kind is not Format.PLAIN for kind in stored.formats])
    parts, others = parts_of(*columns, lows, codes=STORED_DTYPES, in_order=by_chance)
    scales = [
        stored.scales[row] if kind.has_scales else None
        for row, kind in enumerate(stored.formats[: len(columns) - 3])
    ]
    given = [row for row in scales if row is not None]
    if not given:
        return parts, others
    geometry = geometry_of(*given)
    if geometry is None or not geometry.alike or geometry.device != _CPU:
        return [], [*range(count)]
    found: list[Part] = []
    for part in parts:
        rows = [*part.rows, *[[] if row is None else pick(row, part.places) for row in scales]]
        chunks = in_blocks(part.chunks, shapes_of(part.rows[0]))
        found.append(part._replace(rows=rows, chunks=chunks, at=addresses(rows)))
    return found, others


def _layout(part: Part, stored: Stored, step: int | torch.Tensor) -> Layout:
    """What kernels are told of the tensors of a part."""
    rows, lengths = blocks_in(shapes_of(part.rows[0]))
    if not any([kind.has_scales for kind in stored.formats]):
        lengths = np.zeros_like(lengths)
    by_place: list[Sequence[int]] = [
        pick(given, part.places) if given else [0] * len(part.places)
        for given in (stored.numbers, stored.starts)
    ]
    count = int(step.item()) if isinstance(step, torch.Tensor) else step
    return Layout(
        rows=rows,
        lengths=lengths,
        numbers=np.array(by_place[0], np.uint32),
        starts=np.array(by_place[1], np.int64),
        seed=np.uint32(stored.seed),
        step=np.uint32(count & 0xFFFFFFFF),
        by_chance=any([kind is not Format.PLAIN for kind in stored.formats]),
    )


def _lamb_norms(work: _Work, rule: LambRule) -> torch.Tensor:
    """``|p|`` and ``|u|`` of each tensor."""
    part, by = work.part, _number(work.inv_scale)
    sums = np.zeros((2, part.chunks.table.shape[1]))
    given = work.layout, by, sums[0], sums[1], formulas.record_of(work, rule)
    part.walk(loops.measure_directions, *given, kinds=work.kinds)
    norms = np.sqrt(np.stack([_by_tensor(part, row) for row in sums]))
    return cast("torch.Tensor", _torch.from_numpy(norms).to(torch.float32))
