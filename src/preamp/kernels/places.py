# SPDX-License-Identifier: BSD-3-Clause
"""Places of tensor lists: what all have in common, and which of them one launch can take.

`geometry_of` finds without Python for each tensor that all are alike, as in most steps, and `sort`
groups them by that; it looks at each place of other lists. `Combining` has the ops that are one
linear combination, and those that split and join, for back ends whose kernels take such groups.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import bad_value
from preamp.core.tensors import dtype_of, layout_of
from preamp.kernels.ops import Column, Ops, Tensors
from preamp.kernels.stored import Format, scales_shape
from preamp.kernels.update import Scalar, Update

_torch: Any = torch
_is_contiguous = torch.Tensor.is_contiguous
_address_of = torch.Tensor.data_ptr

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What kernels load and store."""

STORED_DTYPES = frozenset({torch.int8, torch.uint8, torch.int16})
"""What those of updates of `Stored` lists load and store besides."""

_LOWS = frozenset({torch.int16})

T = TypeVar("T")


def shapes_of(column: Column) -> tuple[torch.Size, ...]:
    """The shapes of tensors, as `plan_of` takes them."""
    return tuple([tensor.shape for tensor in cast("Tensors", column)])


@dataclass(frozen=True, slots=True)
class Alike:
    """Places whose tensors have, list by list, the same dtypes."""

    dtypes: tuple[torch.dtype, ...]  # of each list
    places: Sequence[int]  # a range if these are all
    shapes: tuple[torch.Size, ...]  # of these places
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is the same of lists whose tensors are all contiguous and of their places' shapes."""

    shapes: tuple[torch.Size, ...]  # of each place
    device: torch.device | None  # where all lie in memory of their own, or ``None``
    # All places, if there is such a device and kernels take the dtypes; else none
    alike: tuple[Alike, ...]


class _Known:
    """Lists that were looked at before; from the second time on with torch's guards on them.

    The guards, which compilers use, compare what each tensor is *now* with what one in its place
    was: type, dtype, device, sizes and strides, in a tenth of the time that Python takes. They keep
    no tensor alive.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Remember, without guards."""
        self.geometry = geometry
        self._guards: Any = None

    def is_of(self, columns: Sequence[Column]) -> bool:
        """Whether the guards find everything as it was."""
        if self._guards is None:
            return False
        return self._guards.check(*itertools.chain.from_iterable(columns))

    @property
    def is_guarded(self) -> bool:
        """Whether there are guards."""
        return self._guards is not None

    def guard(self, columns: Sequence[Column]) -> None:
        """Make guards; where this version of torch has none, lists are looked at in Python."""
        kind = getattr(getattr(_torch._C._dynamo, "guards", None), "TensorGuards", None)
        if kind is None:
            return
        tensors = cast("list[torch.Tensor]", list(itertools.chain.from_iterable(columns)))
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        with contextlib.suppress(TypeError):
            self._guards = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


_MOST_KNOWN = 64
_MOST_ALIKE = 4  # models of the same shapes, whose tensors differ in what guards look at
_known: dict[tuple[Any, ...], list[_Known]] = {}


def geometry_of(*columns: Column, codes: Set[torch.dtype] = frozenset()) -> Geometry | None:
    """What lists have in common; ``None`` unless all tensors are there, plain, and contiguous.

    ``codes`` are dtypes that plain tensors may have besides those of floating point.
    """
    leaders = cast("Tensors", columns[0])
    if not leaders or len(set(map(len, columns))) > 1:
        return None
    key = (len(leaders), len(columns), leaders[0].shape, leaders[-1].shape)
    alike = _known.setdefault(key, [])
    for known in alike:
        if known.is_of(columns):
            return known.geometry
    if any(type(None) in set(map(type, column)) for column in columns):
        return None
    shapes = shapes_of(leaders)
    if not all(shapes_of(column) == shapes for column in columns[1:]):
        return None
    if not all([are_contiguous(column, codes) for column in columns]):
        return None
    kinds = [tuple(map(dtype_of, column)) for column in columns]
    device = _device_of(columns)
    geometry = Geometry(shapes, device, () if device is None else _alike(kinds, shapes))
    for known in alike:
        if not known.is_guarded and known.geometry == geometry:
            known.guard(columns)
            return geometry
    alike[:] = [*alike[-_MOST_ALIKE + 1 :], _Known(geometry)]
    if len(_known) > _MOST_KNOWN:
        _known.pop(next(iter(_known)), None)
    return geometry


def _alike(
    kinds: Sequence[tuple[torch.dtype, ...]], shapes: tuple[torch.Size, ...]
) -> tuple[Alike, ...]:
    """All places by their dtypes; none if kernels take one of these in no list."""
    if not {*itertools.chain.from_iterable(kinds)} <= {*DTYPES, *STORED_DTYPES}:
        return ()
    found: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, dtypes in enumerate(zip(*kinds, strict=True)):
        found.setdefault(dtypes, []).append(place)
    alike: list[Alike] = []
    for dtypes, at in found.items():
        own = shapes if len(found) == 1 else tuple(pick(shapes, at))
        places = range(len(shapes)) if len(found) == 1 else at
        alike.append(Alike(dtypes, places, own, tuple([shape.numel() for shape in own])))
    return tuple(alike)


OWN_MEMORY = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that lie in memory; of others it is asked."""


def _device_of(columns: Sequence[Column]) -> torch.device | None:
    """The device on which the values of all tensors lie at ``data_ptr``, if there is one.

    Those of views that negate do not.
    """
    tensors = [*itertools.chain.from_iterable(cast("Sequence[Tensors]", columns))]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or any([tensor.is_neg() for tensor in tensors]):
        return None
    return devices.pop() if all(map(has_memory, tensors)) else None


def has_memory(tensor: Any) -> bool:
    """Whether the values lie at ``data_ptr``.

    Not those of wrappers around other tensors, such as ``DTensor``, nor of fake ones. Of what
    torch's transforms wrap only ``data_ptr`` itself tells.
    """
    if type(tensor) in OWN_MEMORY:
        return True
    return not hasattr(tensor, "fake_mode") and (not tensor.numel() or bool(tensor.data_ptr()))


def addresses(rows: Sequence[Tensors]) -> np.ndarray:
    """Where the tensors of each row lie now, int64; zeros for a row that has none.

    That of an empty tensor is zero, and that of one whose storage was freed, which guards do not
    notice.
    """
    count = len(rows[0])
    every = [map(_address_of, row) if row else itertools.repeat(0, count) for row in rows]
    found: Any = np.fromiter(itertools.chain.from_iterable(every), np.int64, len(rows) * count)
    return found.reshape(-1, count)


def check_lengths(*columns: Sequence[Any]) -> None:
    """Refuse lists of other lengths than the first; nothing was changed yet."""
    lengths = list(map(len, columns))
    if len(set(lengths)) > 1:
        raise bad_value(
            f"Lists of {', '.join(map(str, lengths))} tensors were given",
            "All lists of a call are equally long",
            "Leave parameters without a gradient out of every list",
        )


def check_shapes(*columns: Column) -> tuple[torch.Size, ...]:
    """Refuse tensors of another shape than the first of their place, and return the shapes.

    Nothing was changed yet. Blocks would pair elements wrongly, and torch's fused kernels read past
    their ends.
    """
    shapes = [tensor.shape for tensor in cast("Tensors", columns[0])]
    for column in columns[1:]:
        found = [None if tensor is None else tensor.shape for tensor in column]
        if found == shapes:
            continue
        for place, (wanted, got) in enumerate(zip(shapes, found, strict=True)):
            if got is not None and got != wanted:
                raise bad_value(
                    f"A gradient or state of shape {tuple(got)} was given for parameter "
                    f"{place} of shape {tuple(wanted)}",
                    "Gradients and state have the shapes of their parameters",
                    "Load a checkpoint of the same model, its parameters in the same order",
                )
    return tuple(shapes)


def check_stored(params: Tensors, state: Sequence[Tensors], update: Update) -> None:
    """Refuse what does not fit together in ``update.stored``; nothing was changed yet."""
    stored = update.stored
    if stored is None or not params:
        return
    shapes, kinds = shapes_of(params), set(map(dtype_of, params))
    if torch.float64 in kinds:
        raise _does_not_fit("float64 parameters", "Masters and moments of float32")
    if stored.lows is not None:
        if update.halves is not None or not kinds <= set(HALF_DTYPES):
            raise _does_not_fit(
                f"lows beside {'halves' if update.halves is not None else f'{kinds} parameters'}",
                "Half parameters with an int16 tensor each, and no other halves,",
            )
        _check_column("lows", stored.lows, shapes, torch.int16)
    if not stored.formats:
        return
    if len(stored.formats) != len(state):
        raise _does_not_fit(
            f"{len(stored.formats)} formats for {len(state)} lists of state", "One for each list"
        )
    if set(stored.formats) != {Format.PLAIN}:
        check_lengths(params, stored.numbers, stored.starts)
    for row, (kind, column) in enumerate(zip(stored.formats, state, strict=True)):
        if kind.dtype is not None:
            _check_column(kind.value, column, shapes, kind.dtype)
        if kind.has_scales:
            scales = stored.scales[row] if row < len(stored.scales) else None
            if scales is None or not all(shapes):
                raise _does_not_fit(
                    f"{kind.value} tensors without scales or dimensions",
                    "Tensors of rows, and of each one of scales,",
                )
            _check_column("scales", scales, scales_shapes(shapes), torch.float32)


def _check_column(
    name: str, column: Tensors, shapes: tuple[Sequence[int], ...], dtype: torch.dtype
) -> None:
    check_lengths(shapes, column)
    if set(map(dtype_of, column)) != {dtype} or shapes_of(column) != shapes:
        found = sorted({f"{tuple(t.shape)} of {t.dtype}" for t in column})
        wanted = sorted({f"{tuple(shape)}" for shape in shapes})
        raise _does_not_fit(
            f"{name} of {', '.join(found)}", f"Tensors of {', '.join(wanted)} of {dtype}"
        )


def _does_not_fit(got: str, wanted: str) -> ValueError:
    return bad_value(
        f"An update of stored lists got {got}",
        f"{wanted} are what it takes",
        "Load a checkpoint of the same model and storage",
    )


@functools.lru_cache(maxsize=64)
def scales_shapes(shapes: tuple[torch.Size, ...]) -> tuple[tuple[int, int], ...]:
    """Of the scales of tensors of these shapes."""
    return tuple(map(scales_shape, shapes))


def are_contiguous(column: Column, codes: Set[torch.dtype] = frozenset()) -> bool:
    """Whether the tensors that are there are all dense floats in the order of their memory."""
    if type(None) in set(map(type, column)):
        column = [tensor for tensor in column if tensor is not None]
    return are_plain(column, codes) and all(map(_is_contiguous, cast("Tensors", column)))


def are_plain(tensors: Column, codes: Set[torch.dtype] = frozenset()) -> bool:
    """Whether they are dense tensors of floating point, or of ``codes``."""
    layouts, dtypes = set(map(layout_of, tensors)), set(map(dtype_of, tensors)) - codes
    return layouts <= {torch.strided} and all(dtype.is_floating_point for dtype in dtypes)


@dataclass(frozen=True, slots=True)
class Group:
    """Places that one launch takes: all on one device, their dtypes equal list by list."""

    device: torch.device  # where they are
    dtypes: tuple[torch.dtype | None, ...]  # dtype of each list, ``None`` where it has no tensors
    rows: tuple[Tensors, ...]  # the lists
    positions: Sequence[int]  # which places of the caller's lists these are
    alike: Alike | None = None  # what is known of them, if all are contiguous


def sort(
    *lists: Column, scalars: int = 0, codes: Set[torch.dtype] = frozenset(), in_order: bool = False
) -> tuple[list[Group], list[int]]:
    """Return the groups, and the places that kernels cannot take.

    A kernel walks memory in storage order. So the tensors of a place must be dense, with equal
    strides, on one device, of `DTYPES`, and lie in memory of their own. The first list has a
    tensor in every place; the last ``scalars`` lists hold tensors of other shapes. Dtypes may be of
    ``codes`` too; ``in_order`` takes contiguous tensors only.
    """
    groups = _alike_groups(lists[: len(lists) - scalars], lists[len(lists) - scalars :], codes)
    if groups is not None:
        return groups, []
    return _sort_places(*lists, scalars=scalars, codes=codes, in_order=in_order)


def _alike_groups(
    lists: Sequence[Column], scalars: Sequence[Column], codes: Set[torch.dtype]
) -> list[Group] | None:
    """The groups of lists that `geometry_of` knows; ``None`` if they are not of that kind."""
    if not lists[0]:
        return []
    if not all(map(_is_whole, (*lists, *scalars))):
        return None
    rows = list(map(_rows_of, lists))
    # A list that comes twice, since targets are also read, is looked at once: torch's guards refuse
    # a tensor that is among several twice.
    distinct = {id(row): row for row in rows if row}
    geometry = geometry_of(*distinct.values(), codes=codes)
    if geometry is None or geometry.device is None or not geometry.alike:
        return None
    others = list(map(_rows_of, scalars))
    behind = _uniform(others, geometry.device)
    if behind is None:
        return None
    groups: list[Group] = []
    for alike in geometry.alike:
        known = dict(zip(distinct, alike.dtypes, strict=True))
        dtypes = (*[known[id(row)] if row else None for row in rows], *behind)
        own = [*rows, *others]
        if not isinstance(alike.places, range):
            own = [pick(row, alike.places) if row else [] for row in own]
        groups.append(Group(geometry.device, dtypes, tuple(own), alike.places, alike))
    return groups


def _rows_of(column: Column) -> Tensors:
    return cast("Tensors", column) if _is_there(column) else []


def _uniform(
    columns: Sequence[Tensors], device: torch.device
) -> tuple[torch.dtype | None, ...] | None:
    """The dtype of each list; ``None`` unless it has one, and lies on ``device``."""
    found: list[torch.dtype | None] = []
    for column in columns:
        geometry = geometry_of(column) if column else None
        if column and (geometry is None or geometry.device != device or len(geometry.alike) != 1):
            return None
        found.append(None if geometry is None else geometry.alike[0].dtypes[0])
    return tuple(found)


def _is_there(column: Column) -> bool:
    return bool(column) and column[0] is not None


def _is_whole(column: Column) -> bool:
    """Whether it has a tensor in every place, or in none."""
    return _is_there(column) or set(map(type, column)) <= {type(None)}


def _sort_places(
    *lists: Column, scalars: int, codes: Set[torch.dtype], in_order: bool
) -> tuple[list[Group], list[int]]:
    groups: dict[tuple[torch.device, tuple[torch.dtype | None, ...]], list[int]] = {}
    others: list[int] = []
    shaped = len(lists) - scalars
    for position, place in enumerate(zip(*lists, strict=True)):
        dtypes = _dtypes(place, shaped, codes, in_order=in_order)
        if dtypes is None:
            others.append(position)
            continue
        device = cast("torch.Tensor", place[0]).device
        groups.setdefault((device, dtypes), []).append(position)
    return [_group(*key, at, lists) for key, at in groups.items()], others


def _group(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    positions: list[int],
    lists: Sequence[Column],
) -> Group:
    pairs = zip(lists, dtypes, strict=True)
    rows: list[Any] = [[] if dtype is None else pick(column, positions) for column, dtype in pairs]
    return Group(device, dtypes, tuple(rows), positions)


def pick(row: Sequence[T], positions: Sequence[int]) -> list[T]:
    """The tensors of ``row`` at ``positions``."""
    return [row[position] for position in positions]


def _dtypes(
    place: Column, shaped: int, codes: Set[torch.dtype], *, in_order: bool
) -> tuple[torch.dtype | None, ...] | None:
    """A place's dtypes, ``None`` if kernels cannot take it; a plain loop, as all steps run it."""
    first = cast("torch.Tensor", place[0])
    device, shape = first.device, first.shape
    dtypes: list[torch.dtype | None] = []
    is_contiguous = True
    for index, tensor in enumerate(place):
        if tensor is None:
            dtypes.append(None)
            continue
        dtype = tensor.dtype
        if dtype not in DTYPES and dtype not in codes:
            return None
        if tensor.layout is not torch.strided or tensor.is_neg():
            return None
        if not has_memory(tensor):
            return None  # a wrapper around other tensors, such as DTensor
        if tensor.device != device or (index < shaped and tensor.shape != shape):
            return None
        is_contiguous = is_contiguous and tensor.is_contiguous()
        dtypes.append(dtype)
    if not is_contiguous and (in_order or not _walk_alike(place[:shaped])):
        return None
    return tuple(dtypes)


def _walk_alike(place: Column) -> bool:
    """Whether the tensors are dense and have their elements in the same order."""
    orders = [_steps(tensor) for tensor in place if tensor is not None]
    return _dense(orders[0]) and all([order == orders[0] for order in orders])


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that is walked along."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in dimensions if size != 1]


def _dense(steps: list[tuple[int, int]]) -> bool:
    """Whether memory is covered once, without gaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(steps):
        if stride != expected:
            return False
        expected *= size
    return True


class Combining(Ops):
    """What is done to each element: groups in kernels, the rest in the plain back end."""

    plain: Ops

    @abstractmethod
    def _groups(
        self, *columns: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[Sequence[Any], list[int]]:
        """The groups of places that one launch takes, and the places that no kernel can take.

        ``codes`` are dtypes that tensors may have besides those of floating point.
        """

    @abstractmethod
    def _combine(
        self, group: Any, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        """``target = a * x + b * y`` for the lists of a group; no ``y`` means ``a * x``.

        ``factors`` have one for each of the caller's places in place of ``a``.
        """

    @abstractmethod
    def _take_over(self, group: Any) -> None:
        """`take_over_` for the two lists of a group."""

    @abstractmethod
    def _convert(self, group: Any, *, joins: bool) -> None:
        """Split the first list of a group into the others, or join these into it."""

    @torch.no_grad()
    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        check_lengths(targets, xs, ys)
        groups, others = self._groups(targets, xs, ys)
        for group in groups:
            self._combine(group, a, b)
        if others:
            self.plain.axpby_(pick(targets, others), a, pick(xs, others), b, pick(ys, others))

    @torch.no_grad()
    def scale_add_(self, grads: Tensors, factor: Scalar, addends: Column) -> None:
        check_lengths(grads, addends)
        groups, others = self._groups(grads, grads, addends)
        for group in groups:
            self._combine(group, factor)
        if others:
            self.plain.scale_add_(pick(grads, others), factor, pick(addends, others))

    @torch.no_grad()
    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        check_lengths(sources, targets)
        groups, others = self._groups(targets, sources, [None] * len(targets))
        for group in groups:
            self._combine(group, 1.0)
        if others:
            self.plain.cast_copy_(pick(sources, others), pick(targets, others))

    @torch.no_grad()
    def take_over_(self, masters: Tensors, halves: Tensors) -> None:
        check_lengths(masters, halves)
        groups, others = self._groups(masters, halves, [None] * len(masters))
        for group in groups:
            self._take_over(group)
        if others:
            self.plain.take_over_(pick(masters, others), pick(halves, others))

    @torch.no_grad()
    def split_(self, wides: Tensors, halves: Tensors, lows: Column) -> None:
        groups, others = self._groups(wides, halves, lows, codes=_LOWS)
        for group in groups:
            self._convert(group, joins=False)
        if others:
            self.plain.split_(pick(wides, others), pick(halves, others), pick(lows, others))

    @torch.no_grad()
    def join_(self, halves: Tensors, lows: Tensors, wides: Tensors) -> None:
        groups, others = self._groups(wides, halves, lows, codes=_LOWS)
        for group in groups:
            self._convert(group, joins=True)
        if others:
            self.plain.join_(pick(halves, others), pick(lows, others), pick(wides, others))

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        check_lengths(halves, factors, addends)
        results = [
            torch.empty_like(half, dtype=torch.float32) if addend is None else addend
            for half, addend in zip(halves, addends, strict=True)
        ]
        groups, others = self._groups(results, halves, addends)
        for group in groups:
            self._combine(group, 1.0, 1.0, factors)
        if others:
            rest = (pick(halves, others), pick(factors, others), pick(addends, others))
            for position, result in zip(others, self.plain.widen_add(*rest), strict=True):
                results[position] = result
        return results
