# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of which each rank has a piece, and how to cut other pieces out of those saved.

A frame says how the elements of a whole tensor lie; a box is a block of elements in a frame. Under
``fully_shard`` the frame is the tensor itself. Where ranks share masters it is the vector of
all elements in the order of their memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preamp.checkpoint.staging import Value
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state
from preamp.core.tensors import local_of
from preamp.kernels.shards import (
    box_of,
    copies_of,
    has_whole_rows,
    is_evenly_cut,
    is_on_every_rank_once,
    sharded_as,
)
from preamp.kernels.stored import scales_shape


@dataclass(frozen=True, slots=True)
class Box:
    """A block of elements."""

    offsets: tuple[int, ...]  # of its first element, one for each dimension of the frame
    sizes: tuple[int, ...]  # how many elements it has along each

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """What two boxes have in common; may be empty."""
        pairs = list(zip(self.offsets, other.offsets, strict=True))
        stops = zip(self._stops(), other._stops(), strict=True)
        starts = tuple(max(pair) for pair in pairs)
        sizes = (min(pair) - start for start, pair in zip(starts, stops, strict=True))
        return Box(starts, tuple(max(0, size) for size in sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box, a part of ``outer``, is in a tensor that holds ``outer``."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(a, a + size) for a, size in zip(starts, self.sizes, strict=True))

    def _stops(self) -> tuple[int, ...]:
        return tuple(a + size for a, size in zip(self.offsets, self.sizes, strict=True))

    def to_json(self) -> list[list[int]]:
        """Return it as plain data."""
        return [list(self.offsets), list(self.sizes)]

    @classmethod
    def from_json(cls, given: Any) -> Box:
        """Read it again; `SavedShards.check` tells whether it is a block of elements."""
        offsets, sizes = (tuple(map(int, numbers)) for numbers in given)
        return cls(offsets, sizes)


@dataclass(frozen=True, slots=True)
class Frame:
    """How the elements of a tensor lie."""

    shape: tuple[int, ...]  # of the tensor
    # Its dimensions in the order of memory, if the frame is the vector of elements in that order;
    # ``None`` if the frame is the tensor itself.
    order: tuple[int, ...] | None = None

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the frame."""
        return self.shape if self.order is None else (math.prod(self.shape),)

    def all(self) -> Box:
        """The box with every element."""
        return Box((0,) * len(self.extent), self.extent)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` as this frame has it: a view where its memory permits one."""
        return whole if self.order is None else whole.permute(self.order).reshape(-1)

    def put_together(self, laid_out: torch.Tensor) -> torch.Tensor:
        """Return the tensor of which ``laid_out`` has the elements; a view."""
        if self.order is None:
            return laid_out
        lengths = [self.shape[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return laid_out.view(lengths).permute(back)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What this rank has of a tensor."""

    data: Value  # the elements of ``box``, in its shape
    frame: Frame  # of the whole tensor
    box: Box  # which elements they are
    is_alone: bool  # whether no other rank has elements of the box
    copies: int = 1  # how many ranks have this piece, as far as the tensor tells
    is_first: bool = True  # whether this one is the first of them


def shard_of(tensor: torch.Tensor, place: str, ranks: int) -> Shard:
    """Return this rank's piece of a ``DTensor``, not copied; raises if it is no block."""
    if not is_evenly_cut(tensor):
        placements: Any = getattr(tensor, "placements", None)
        raise bad_state(
            f"{place} {tuple(tensor.shape)} has the placements {placements}, by which ranks "
            "do not hold one block of elements each",
            "Tensors are saved that are sharded or copied along each dimension of their mesh; "
            "those cut twice along one dimension in equal parts",
            "Redistribute it first, or choose sizes that the mesh divides",
        )
    frame, local = Frame(tuple(tensor.shape)), local_of(tensor.detach())
    # That of no elements has forms that differ between versions of torch
    box = Box(*box_of(tensor)) if local.numel() else Box((0,) * tensor.dim(), tuple(local.shape))
    return Shard(local, frame, box, is_on_every_rank_once(tensor, ranks), *copies_of(tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Which elements this rank has of a parameter, and with it of its master and its moments."""

    frame: Frame  # of the whole one
    box: Box
    rows: tuple[int, int] | None  # the first of its rows and how many, if they are whole ones
    like: torch.Tensor | None = None  # the parameter, if that is a ``DTensor``

    @classmethod
    def of_sharded(cls, param: torch.Tensor) -> Place:
        """That of a ``DTensor``."""
        piece = shard_of(param, "A parameter", ranks=1)
        rows = (piece.box.offsets[0], piece.box.sizes[0]) if has_whole_rows(param) else None
        return cls(piece.frame, piece.box, rows, param)

    def of_scales(self) -> Place:
        """That of a moment's scales, which go with whole rows of the moment."""
        frame, (first, count) = Frame(scales_shape(self.frame.shape)), self.rows or (0, 0)
        return Place(frame, Box((first, 0), (count, frame.shape[1])), self.rows, self.like)

    def taken_from(self, value: Any) -> Any:
        """Return what is here of ``value``; or itself, if it is not of the whole one's shape."""
        is_tensor = isinstance(value, (torch.Tensor, SavedShards))
        if not is_tensor or shape_of(value) != self.frame.shape:
            return value
        own = cut(value, self.frame, self.box)
        # Where the file is: loading it copies it to its device
        return own if self.like is None else sharded_as(own, self.like, self.frame.shape)


@dataclass(frozen=True, slots=True, eq=False)
class SavedShards:
    """A whole tensor, as far as it was read: what ranks had of it."""

    frame: Frame  # of the whole tensor
    dtype: torch.dtype  # of it and of all pieces
    held: Sequence[tuple[Box, torch.Tensor]]  # boxes that fill the frame, and their elements

    def check(self) -> None:
        """Raise `ValueError` unless the pieces are exactly the tensor."""
        boxes = [box for box, _ in self.held]
        everything = self.frame.all()
        is_inside = all(
            len(box.sizes) == len(everything.sizes) and everything.overlap(box) == box
            for box in boxes
        )
        is_whole = is_inside and sum(box.numel for box in boxes) == everything.numel
        pairs = itertools.combinations(boxes, 2) if len(boxes) <= _COMPARED else ()
        if not is_whole or any(a.overlap(b).numel for a, b in pairs):
            raise ValueError(f"the pieces of a tensor {self.frame.shape} do not make it up")
        for box, data in self.held:
            if (data.dtype, tuple(data.shape)) != (self.dtype, box.sizes):
                raise ValueError(f"a piece of a tensor is {data.dtype} {tuple(data.shape)}")

    def whole(self) -> torch.Tensor:
        """Return all of it, on the CPU."""
        return self.frame.put_together(self._at(self.frame.all()))

    def cut(self, frame: Frame, box: Box) -> torch.Tensor:
        """Return the elements of ``box`` in any frame of a tensor of this shape; a new tensor."""
        if frame == self.frame:
            return self._at(box)
        return cut(self.whole(), frame, box)

    def _at(self, box: Box) -> torch.Tensor:
        made = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        for own, data in self.held:
            common = own.overlap(box)
            if common.numel:
                made[common.within(box)] = data[common.within(own)]
        return made


_COMPARED = 64  # shards that are compared with each other; of more, only the elements are counted


def cut(value: torch.Tensor | SavedShards, frame: Frame, box: Box) -> torch.Tensor:
    """Return the elements of ``box`` of a tensor that was saved whole or in pieces, as a copy."""
    if isinstance(value, SavedShards):
        return value.cut(frame, box)
    return frame.laid_out(value)[box.within(frame.all())].clone()


def shape_of(value: torch.Tensor | SavedShards) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return value.frame.shape if isinstance(value, SavedShards) else tuple(value.shape)


def describe_frame(name: str, piece: Shard) -> list[Any]:
    """Return as plain data what `saved_shards` needs."""
    order = None if piece.frame.order is None else list(piece.frame.order)
    return [name, dtype_name(piece.data.dtype), list(piece.frame.shape), order]


def saved_shards(made: Any, dtype: torch.dtype, found: Mapping[str, Any]) -> SavedShards:
    """Put together boxes of elements as `describe_frame` says; `ValueError` if they do not fit."""
    name, _, shape, order = made
    dims = None if order is None else tuple(map(int, order))
    frame = Frame(tuple(map(int, shape)), dims)
    if dims is not None and sorted(dims) != list(range(len(frame.shape))):
        raise ValueError(f"{dims} is no order of the dimensions of {frame.shape}")
    pieces = SavedShards(frame, dtype, found.get(name, []))
    pieces.check()
    return pieces
