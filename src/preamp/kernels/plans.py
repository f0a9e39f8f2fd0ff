# SPDX-License-Identifier: BSD-3-Clause
"""Plans of lists: which places one launch takes, where their tensors lie, what follows from that.

A kernel walks memory in storage order. So the tensors of a place must be dense, with equal strides,
on one device, of `DTYPES`, and lie in memory of their own. `planned` sorts such places by device
and dtypes into a `Plan` each, and names the others, which the plain back end takes.

Lists come again in every step, and each tensor is asked as little as can be. What lists were sorted
into is remembered with torch's guards, which compilers use: these compare type, dtype, device,
sizes and strides of each tensor with what one in its place was, in a tenth of the time that Python
takes, and keep none alive. Of lists that an optimizer knows to hold the very same tensors
(`Standing`) only gradients are guarded, which have their parameters' shape and dtype; square ones
are asked for their strides, since a script may have transposed them where they lie. Guards do not
see freed storage, so addresses are asked in any case.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch

from preamp.core.errors import bad_state, bad_value
from preamp.core.torch_private.subclasses import unhooked

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What kernels load and store."""

STORED_DTYPES = frozenset({torch.int8, torch.uint8, torch.int16})
"""What those of updates of `Stored` lists load and store besides."""

OWN_MEMORY = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that lie in memory; of others it is asked."""

Tensors = Sequence[torch.Tensor]

Column = Sequence["torch.Tensor | None"]
"""One list of an op: parameters, gradients, moments … ``None`` where a place has no such tensor."""

Dtypes = tuple["torch.dtype | None", ...]
T = TypeVar("T")

_guards: Any = getattr(cast("Any", torch)._C._dynamo, "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)  # ``None`` in versions without
_address_of = torch.Tensor.data_ptr


@dataclass(slots=True, eq=False)
class Plan:
    """Places that one launch takes: all on one device, their dtypes equal list by list."""

    device: torch.device
    dtypes: Dtypes  # of each list, ``None`` where it has no tensors
    places: Sequence[int]  # which of the caller's these are
    rows: Sequence[Tensors]  # the lists; one without tensors is empty
    sizes: Sequence[int]  # elements of the first list's tensors
    # What back ends have made that follows from sizes and dtypes alone
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])
    at: np.ndarray = field(init=False)  # addresses of each list, zeros where it is empty

    def of(self, lists: Sequence[Column | None]) -> Plan:
        """The plan for lists of the same kind, as they lie now; transforms of torch have none."""
        plan = Plan(self.device, self.dtypes, self.places, (), self.sizes, self.kept)
        plan.take(lists)
        plan.at = plan.addresses()
        return plan

    def take(self, lists: Sequence[Column | None]) -> None:
        """Have lists of the same kind."""
        self.rows = [
            () if kind is None else pick(cast("Tensors", row), self.places)
            for row, kind in zip(lists, self.dtypes, strict=True)
        ]

    def addresses(self) -> np.ndarray:
        """The address of each tensor, list by list; zero for an empty tensor.

        Raises `PreampStateError` for a tensor whose storage was freed.
        """
        found = np.zeros((len(self.rows), len(self.places)), np.int64)
        seen = dict[int, int]()  # one list may be source and target
        for number, row in enumerate(self.rows):
            same = seen.setdefault(id(row), number)
            if row:
                found[number] = _places_of(row) if same == number else found[same]
        if np.count_nonzero(found) < len(self.places) * sum(map(bool, self.rows)):
            _check_memory(self.rows)
        return found

    @property
    def found(self) -> np.ndarray:
        """The addresses of those lists that have tensors."""
        return self.at if all(self.rows) else self.at[[bool(row) for row in self.rows]]


def _places_of(row: Tensors) -> np.ndarray:
    """Where tensors lie."""
    with unhooked():
        return np.fromiter(map(_address_of, row), np.int64, len(row))


def _check_memory(rows: Sequence[Tensors]) -> None:
    for tensor in itertools.chain(*rows):
        if tensor.numel() and not tensor.data_ptr():
            raise bad_state(
                f"A tensor of shape {tuple(tensor.shape)} has no memory",
                "Kernels read and write parameters, gradients and state where they lie",
                "Take steps while nothing has freed their storages, as FSDP does meanwhile",
            )


class _Known:
    """What lists were sorted into, and guards that say whether others are like them."""

    def __init__(self, rows: Sequence[Tensors], plans: Sequence[Plan], others: list[int]) -> None:
        self.plans = [Plan(p.device, p.dtypes, p.places, (), p.sizes, p.kept) for p in plans]
        self.others = others
        tensors = list(itertools.chain(*rows))
        self._guards: Any = None
        if _TensorGuards is None or type(None) in set(map(type, tensors)):
            return
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        with contextlib.suppress(TypeError):  # a tensor is among them twice
            self._guards = _TensorGuards(
                *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            )

    def is_of(self, rows: Sequence[Tensors]) -> bool:
        """Whether the guards find everything as it was."""
        try:
            return self._guards is not None and self._guards.check(*itertools.chain(*rows))
        except TypeError:  # there is a None
            return False


_MOST_KNOWN = 64
_MOST_ALIKE = 4  # models of the same shapes, whose tensors differ in what guards look at
_known: dict[tuple[Any, ...], list[_Known]] = {}


GRADS = 1
"""Which of the lists of an update has gradients."""


class Standing:
    """What launches lists that are updated again and again.

    Whoever passes one vouches that all lists but that of the gradients have the very tensors that
    they had when it was passed first. It keeps none of them alive between updates.
    """

    __slots__ = ("_at", "_grads", "_told", "works")

    def __init__(self) -> None:
        self.works: list[Any] = []
        self._told: Any = None
        # Of each work which places are square, and where all but gradients lie
        self._at: list[tuple[list[int], list[Any]]] = []
        self._grads: _Known  # there once there are works

    def recall(self, lists: Sequence[Any], told: Any) -> bool:
        """Whether works may be started again, with their lists, and where their gradients lie.

        That is so if the update is ``told`` the same, gradients are as they were, and the others
        where they were. Else works, which may have lists by now, are forgotten.
        """
        works, self.works = self.works, []
        if not works or self._told != told or not self._grads.is_of([lists[GRADS]]):
            return False
        for work, (squares, fixed) in zip(works, self._at, strict=True):
            plan: Plan = work.plan
            plan.take(lists)
            if _without_grads(plan, squares) != fixed:
                return False
            plan.at[GRADS] = own = _places_of(plan.rows[GRADS])
            if np.count_nonzero(own) < len(own):
                _check_memory(plan.rows)
        self.works = works
        return True

    def note(self, lists: Sequence[Any], told: Any, works: Sequence[Any]) -> None:
        """Remember the works that all places of ``lists`` were sorted into."""
        self._told, self.works = told, [*works]
        self._at = []
        for plan in [cast("Plan", work.plan) for work in works]:
            squares = [n for n, param in enumerate(plan.rows[0]) if _is_square(param)]
            self._at.append((squares, _without_grads(plan, squares)))
        self._grads = _Known([lists[GRADS]], [], [])


def _is_square(tensor: torch.Tensor) -> bool:
    """Whether it has the same shape when it is transposed."""
    sizes = [size for size in tensor.shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _without_grads(plan: Plan, squares: Sequence[int]) -> list[Any]:
    """Where the tensors of all lists but gradients lie, and the strides of square ones."""
    rows = [row for number, row in enumerate(plan.rows) if row and number != GRADS]
    with unhooked():
        return [(_places_of(row).tobytes(), [row[n].stride() for n in squares]) for row in rows]


def planned(
    *lists: Column | None,
    scalars: int = 0,
    codes: Set[torch.dtype] = frozenset(),
    in_order: bool = False,
    only_on: str | None = None,
) -> tuple[list[Plan], list[int]]:
    """Return plans, and the places that kernels cannot take.

    The first list has a tensor in every place; the last ``scalars`` lists hold tensors of other
    shapes. Dtypes may be of ``codes`` too; ``in_order`` takes contiguous tensors only, and
    ``only_on`` those of one type of devices.
    """
    leaders = cast("Tensors", lists[0])
    if not leaders:
        return [], []
    key, rows = _kind_of(lists, (scalars, codes, in_order, only_on))
    alike = [] if key is None else _known.setdefault(key, [])
    for known in alike:
        if known.is_of(rows):
            return [plan.of(lists) for plan in known.plans], known.others
    plans, others = _sorted(lists, scalars, codes, only_on, in_order=in_order)
    if key is not None:
        alike[:] = [*alike[-_MOST_ALIKE + 1 :], _Known(rows, plans, others)]
        if len(_known) > _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
    return plans, others


def check_lengths(*columns: Sequence[Any]) -> None:
    """Refuse lists of other lengths than the first; nothing was changed yet."""
    lengths = list(map(len, columns))
    if len(set(lengths)) > 1:
        raise bad_value(
            f"Lists of {', '.join(map(str, lengths))} tensors were given",
            "All lists of a call are equally long",
            "Leave parameters without a gradient out of every list",
        )


def _kind_of(
    lists: Sequence[Column | None], told: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, list[Tensors]]:
    """What lists that are alike have in common, and those that guards look at, each once.

    Targets are also read, and guards refuse a tensor that is among several twice. Lists that have
    tensors in some places only have no such key.
    """
    distinct: dict[int, Any] = {}
    pattern: list[int | None] = []
    for column in lists:
        if not column or column[0] is None:
            if column and set(map(type, column)) != {type(None)}:
                return None, []
            pattern.append(None)
            continue
        distinct[id(column)] = column
        pattern.append(list(distinct).index(id(column)))
    leaders = cast("Tensors", lists[0])
    if _TensorGuards is None or {*map(len, distinct.values())} != {len(leaders)}:
        return None, []
    return (len(leaders), *pattern, leaders[0].shape, leaders[-1].shape, told), [*distinct.values()]


def _sorted(
    lists: Sequence[Column | None],
    scalars: int,
    codes: Set[torch.dtype],
    only_on: str | None,
    *,
    in_order: bool,
) -> tuple[list[Plan], list[int]]:
    """Look at each place."""
    nothing = [None] * len(cast("Tensors", lists[0]))
    columns = [column or nothing for column in lists]
    shaped = len(lists) - scalars
    found: dict[tuple[torch.device, Dtypes], list[int]] = {}
    others: list[int] = []
    for position, place in enumerate(zip(*columns, strict=True)):
        is_here = only_on is None or place[0].device.type == only_on
        dtypes = _dtypes(place, shaped, DTYPES | codes, in_order=in_order) if is_here else None
        if dtypes is None:
            others.append(position)
        else:
            found.setdefault((cast("torch.Tensor", place[0]).device, dtypes), []).append(position)
    plans: list[Plan] = []
    for (device, dtypes), places in found.items():
        every = range(len(nothing)) if len(places) == len(nothing) else places
        sizes = [tensor.numel() for tensor in pick(cast("Tensors", lists[0]), every)]
        plans.append(Plan(device, dtypes, every, (), sizes).of(columns))
    return plans, others


def _dtypes(
    place: Column, shaped: int, taken: Set[torch.dtype], *, in_order: bool
) -> Dtypes | None:
    """A place's dtypes, ``None`` if kernels cannot take it."""
    tensors = [tensor for tensor in place if tensor is not None]
    first = tensors[0]
    walked = [tensor for tensor in place[:shaped] if tensor is not None]
    if first.device.type == "meta" or any([tensor.shape != first.shape for tensor in walked]):
        return None
    for tensor in tensors:
        if tensor.dtype not in taken or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        if tensor.device != first.device or not has_memory(tensor):
            return None
    if not all([tensor.is_contiguous() for tensor in tensors]):
        orders = list(map(_steps, walked))
        if in_order or not _is_dense(orders[0]) or any([order != orders[0] for order in orders]):
            return None
    return tuple([None if tensor is None else tensor.dtype for tensor in place])


def has_memory(tensor: Any) -> bool:
    """Whether the values lie at ``data_ptr``, if they lie anywhere.

    Not those of wrappers around other tensors, such as ``DTensor``, nor of fake ones, of what
    torch's transforms wrap, and of freed storages.
    """
    if type(tensor) not in OWN_MEMORY and hasattr(tensor, "fake_mode"):
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return False
    return bool(address) or not tensor.numel()


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that is walked along."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in dimensions if size != 1]


def _is_dense(steps: list[tuple[int, int]]) -> bool:
    """Whether memory is covered once, without gaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(steps):
        if stride != expected:
            return False
        expected *= size
    return True


def pick(row: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """The tensors of ``row`` at ``places``; the row itself for a range, which is all of them."""
    return row if isinstance(places, range) else [row[place] for place in places]
