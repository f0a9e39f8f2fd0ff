# SPDX-License-Identifier: BSD-3-Clause
"""Lists of tensors, cut into blocks.

With thousands of tensors Python is what a step waits for. So lists are handed on to torch as they
are or as slices, a list is cut only when its shapes are new, and views of the memory that small
tensors are joined in are made once and kept.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Generator, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.tensors import dtype_of, is_capturing
from preamp.kernels.ops import Column, Tensors
from preamp.kernels.places import are_contiguous, are_plain
from preamp.kernels.reference import Reference
from preamp.kernels.update import Scalar
from preamp.kernels.vectors import cat

REFERENCE = Reference()

_torch: Any = torch
_is_contiguous = torch.Tensor.is_contiguous

_TOGETHER = 512
"""Most tensors of a block: with more of them their Python objects no longer stay in the cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large blocks are, in elements.

    Multiples of 64: torch's fused kernels may round the last elements of a piece otherwise.
    """

    # For each thread of a CPU, where a computation makes several temporaries of a block's size
    small: int = 1 << 16
    # For each thread, where torch's fused kernels make none; larger, since calls cost
    large: int = 1 << 18
    large_at_least: int = 1 << 19  # for few threads, which have a cache of many to themselves
    # On other devices: enough to keep any of them busy, few enough for temporaries
    joined: int = 1 << 24


class Workspace:
    """Memory that small tensors are joined in, one block of a plan after the other."""

    __slots__ = ("_views", "memory")

    def __init__(
        self, shapes: Sequence[Sequence[torch.Size]], elements: int, dtype: torch.dtype
    ) -> None:
        """Make views for the tensors of each block, which has no more than ``elements``."""
        # A vector of a block's elements, on the CPU
        self.memory = torch.empty(elements, dtype=dtype, device="cpu")
        self._views: list[list[torch.Tensor]] = []
        for block in shapes:
            sizes = [shape.numel() for shape in block]
            parts: Tensors = cast("Any", self.memory[: sum(sizes)]).split(sizes)
            self._views.append([p.view(shape) for p, shape in zip(parts, block, strict=True)])

    def views(self, block: int) -> list[torch.Tensor]:
        """The memory in the shapes of the tensors of a block."""
        return self._views[block]


@dataclass(frozen=True, slots=True)
class Cut:
    """Several small tensors that make one block, or one large tensor that makes several."""

    places: Sequence[int]  # where they stand in the lists
    numel: int  # their elements
    index: int  # the number of the block; -1 for a large tensor

    def of(self, column: Sequence[Any]) -> Sequence[Any]:
        """Its tensors in ``column``."""
        first, last, count = self.places[0], self.places[-1], len(self.places)
        if last - first + 1 == count:
            return column[first : last + 1]
        return operator.itemgetter(*self.places)(column)


class Plan:
    """How lists of tensors of these shapes are cut. Empty tensors are left out."""

    def __init__(self, shapes: Sequence[torch.Size], cuts: Sequence[Cut], most: int) -> None:
        """Keep what was cut."""
        self.cuts = cuts  # in the order in which they are walked through
        self.most = most  # elements of a block
        joined = [cut for cut in cuts if cut.index >= 0]
        sizes = (cut.numel if cut.index >= 0 else min(cut.numel, most) for cut in cuts)
        self._elements = max(sizes, default=0)
        self._shapes = [[shapes[place] for place in cut.places] for cut in joined]
        self._spare: dict[torch.dtype, list[Workspace]] = {}

    @contextlib.contextmanager
    def workspaces(self, dtype: torch.dtype, count: int = 1) -> Generator[list[Workspace]]:
        """Lend workspaces to one thread; they are kept for the next call."""
        spare = self._spare.setdefault(dtype, [])
        lent: list[Workspace] = []
        for _ in range(count):
            try:
                lent.append(spare.pop())
            except IndexError:
                with torch.inference_mode(mode=False):
                    lent.append(Workspace(self._shapes, self._elements, dtype))
        yield lent
        # Not those whose views a mode, such as that of fake tensors, made of its own kind.
        spare += [space for space in lent if type(space.memory) is torch.Tensor]


@functools.lru_cache(maxsize=32)
def plan_of(shapes: tuple[torch.Size, ...], most: int) -> Plan:
    """Cut tensors of these shapes into blocks of at most ``most`` elements.

    A block of very small tensors has fewer elements.
    """
    cuts: list[Cut] = []
    together: list[int] = []
    total = blocks = 0

    def close() -> None:
        nonlocal total, blocks
        if together:
            cuts.append(Cut(tuple(together), total, blocks))
            blocks += 1
            together.clear()
            total = 0

    for place, shape in enumerate(shapes):
        size = shape.numel()
        if size > most:
            cuts.append(Cut((place,), size, -1))
        elif size:
            if total + size > most or len(together) == _TOGETHER:
                close()
            together.append(place)
            total += size
    close()
    return Plan(shapes, cuts, most)


class Block:
    """Several small tensors, or a piece of a large one, in every column of an op."""

    __slots__ = ("_index", "_spaces", "columns", "numel")

    def __init__(
        self,
        columns: list[Sequence[Any]],
        numel: int,
        index: int = -1,
        spaces: Sequence[Workspace] = (),
    ) -> None:
        """Hold what a `Cut` found in the columns; ``spaces``, if there are any, one for each."""
        self.columns = columns
        self.numel = numel  # elements of one column
        self._index = index
        self._spaces = spaces

    def flat(self, column: int, dtype: torch.dtype) -> torch.Tensor:
        """A column as one vector, which may be a view of its tensor."""
        tensors = self.columns[column]
        if len(tensors) > 1 and self._spaces and self._spaces[column].memory.dtype is dtype:
            space = self._spaces[column]
            copy_(space.views(self._index), tensors)
            return space.memory[: self.numel]
        return flatten(tensors).to(dtype)

    def split(self, values: torch.Tensor, column: int = -1) -> Sequence[torch.Tensor]:
        """A vector in the shapes of the block's tensors; may overwrite the `flat` ``column``."""
        like = self.columns[0]
        if len(like) == 1:
            return [values.view(like[0].shape)]
        if self._spaces and self._spaces[column].memory.dtype is values.dtype:
            self._spaces[column].memory[: self.numel].copy_(values)
            return self._spaces[column].views(self._index)
        return _torch._C._nn.unflatten_dense_tensors(values, like)

    def write(self, column: int, values: torch.Tensor) -> None:
        """Round a vector into a column."""
        copy_(self.columns[column], self.split(values, column))

    def spread(self, each: Scalar) -> Scalar:
        """One value for each tensor, or for all, as a factor of `flat` columns."""
        if not isinstance(each, torch.Tensor):
            return each
        if each.numel() == 1:
            return each.reshape(())
        numels = [tensor.numel() for tensor in self.columns[0]]
        if is_capturing(each.device):  # replays would copy the sizes from memory long free
            return cat([value.expand(n) for value, n in zip(each.unbind(), numels, strict=True)])
        sizes = torch.tensor(numels, device="cpu")
        if each.device.type != "cpu":
            sizes = sizes.pin_memory().to(each.device, non_blocking=True)
        return torch.repeat_interleave(each, sizes, output_size=self.numel)


def blocks_of(
    plan: Plan, cut: Cut, columns: Sequence[Column], spaces: Sequence[Workspace] = ()
) -> list[Block]:
    """The blocks of a cut."""
    own = [cut.of(column) for column in columns]
    if cut.index >= 0:
        return [Block(own, cut.numel, cut.index, spaces)]
    pieces = [None if t is None else split(t, plan.most) for (t,) in own]
    return [
        Block([[None if part is None else part[i]] for part in pieces], leader.numel())
        for i, leader in enumerate(cast("Tensors", pieces[0]))
    ]


def flatten(tensors: Tensors) -> torch.Tensor:
    """One vector of all elements; a view of a single contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].view(-1)
    return cat([tensor.view(-1) for tensor in tensors])


def split(tensor: torch.Tensor, size: int) -> Tensors:
    """Views of a contiguous tensor, as vectors of at most ``size`` elements."""
    return cast("Any", tensor.view(-1)).split(size)


def copy_(targets: Tensors, sources: Tensors) -> None:
    """``target = source``, each."""
    _torch._foreach_copy_(targets, sources)


def copy_where_wanted(targets: Column, sources: Tensors) -> None:
    """``target = source``, each, where there is a target."""
    if type(None) in set(map(type, targets)):
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not None]
        targets, sources = [t for t, _ in pairs], [s for _, s in pairs]
    if targets:
        copy_(cast("Tensors", targets), sources)


def regular(
    *columns: Column, codes: Set[torch.dtype] = frozenset()
) -> tuple[Sequence[Sequence[Any]], list[int]]:
    """Take out the places whose tensors can be walked through in the order of their memory.

    Returns the columns, contiguous (dense tensors in another order, such as channels_last, are
    views of their memory), without the places that are returned next to them. Those that were given
    if nothing had to be done. ``codes`` are dtypes that tensors may have besides those of floats.
    """
    if all([are_contiguous(column, codes) for column in columns]):
        return columns, []
    kept: list[list[Any]] = [[] for _ in columns]
    odd: list[int] = []
    for place, row in enumerate(zip(*columns, strict=True)):
        in_order = _in_memory_order(row, codes)
        if in_order is None:
            odd.append(place)
            continue
        for column, tensor in zip(kept, in_order, strict=True):
            column.append(tensor)
    return kept, odd


def by_dtype(*columns: Sequence[Any]) -> list[Sequence[Sequence[Any]]]:
    """Sort places by the dtypes of their tensors."""
    if all(_is_of_one_dtype(column) for column in columns):
        return [columns] if columns[0] else []
    sorted_: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in zip(*columns, strict=True):
        key = tuple(None if tensor is None else tensor.dtype for tensor in row)
        for column, tensor in zip(sorted_.setdefault(key, [[] for _ in columns]), row, strict=True):
            column.append(tensor)
    return list(sorted_.values())


def _is_of_one_dtype(column: Column) -> bool:
    kinds = set(map(type, column))
    if type(None) in kinds:
        return len(kinds) == 1
    return len(set(map(dtype_of, column))) <= 1


def _in_memory_order(row: Column, codes: Set[torch.dtype]) -> Sequence[torch.Tensor | None] | None:
    tensors = [tensor for tensor in row if tensor is not None]
    if not are_plain(tensors, codes):
        return None
    if all(map(_is_contiguous, tensors)):
        return row
    first = tensors[0]
    if not _is_dense(first) or any(tensor.stride() != first.stride() for tensor in tensors):
        return None
    size = (first.numel(),)
    return [None if t is None else t.as_strided(size, (1,), t.storage_offset()) for t in row]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
