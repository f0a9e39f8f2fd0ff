# SPDX-License-Identifier: BSD-3-Clause
"""Lists of tensors, cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from preamp.core.errors import message
from preamp.kernels.joining import cat
from preamp.kernels.ops import Tensors

Column = Sequence["torch.Tensor | None"]
"""One list of an op: parameters, gradients, moments … ``None`` where a place has no such tensor."""

_torch: Any = torch

_TOGETHER = 512
"""Most tensors of a block: with more of them their Python objects no longer stay in the cache."""


class Block:
    """Several small tensors, or a piece of a large one, in every column of an op.

    Attributes:
        columns: The tensors, by column.
        numel: Elements of one column.
    """

    __slots__ = ("columns", "numel")

    def __init__(self, columns: list[list[Any]], numel: int) -> None:
        """Hold what `parts` cut."""
        self.columns = columns
        self.numel = numel

    def flat(self, column: int, dtype: torch.dtype) -> torch.Tensor:
        """A column as one vector; a view if it is a single tensor of this dtype, else a copy."""
        tensors = self.columns[column]
        return flatten(tensors).to(dtype)

    def split(self, values: torch.Tensor) -> Tensors:
        """Views of a vector in the shapes of the block's tensors."""
        like = self.columns[0]
        if len(like) == 1:
            return [values.view(like[0].shape)]
        return _torch._C._nn.unflatten_dense_tensors(values, like)

    def write(self, column: int, values: torch.Tensor) -> None:
        """Round a vector into a column."""
        copy_(self.columns[column], self.split(values))

    def copy_column(self, source: int, target: int) -> None:
        """Round one column into another, where that has tensors."""
        pairs = zip(self.columns[target], self.columns[source], strict=True)
        wanted = [(into, out) for into, out in pairs if into is not None]
        if wanted:
            copy_([into for into, _ in wanted], [out for _, out in wanted])

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """One value for each tensor, as a factor of `flat` columns."""
        if each.numel() == 1:
            return each.reshape(())
        sizes = torch.tensor([tensor.numel() for tensor in self.columns[0]], device="cpu")
        if each.device.type != "cpu":
            sizes = sizes.pin_memory().to(each.device, non_blocking=True)
        return torch.repeat_interleave(each, sizes, output_size=self.numel)


class Part:
    """Several small tensors in one block, or one large tensor in several.

    Attributes:
        blocks: The blocks.
        places: Where its tensors stand in the lists that were cut.
    """

    __slots__ = ("blocks", "places")

    def __init__(self, blocks: list[Block], places: list[int]) -> None:
        """Hold what `parts` cut."""
        self.blocks = blocks
        self.places = places


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


def parts(most: int, *columns: Column) -> Iterator[Part]:
    """Cut columns of contiguous tensors; empty tensors are left out.

    Args:
        most: Elements of a block; one of very small tensors has fewer.
        columns: Equally long lists. The first has a tensor in each place.
    """
    small: list[int] = []
    total = 0
    for place, leader in enumerate(cast("Tensors", columns[0])):
        size = leader.numel()
        if size > most:
            yield _pieces(place, most, columns)
        elif size:
            if total + size > most or len(small) == _TOGETHER:
                yield _together(small, total, columns)
                small, total = [], 0
            small.append(place)
            total += size
    if small:
        yield _together(small, total, columns)


def _together(places: list[int], numel: int, columns: Sequence[Column]) -> Part:
    return Part([Block([[column[i] for i in places] for column in columns], numel)], places)


def _pieces(place: int, most: int, columns: Sequence[Column]) -> Part:
    row = [column[place] for column in columns]
    cut = [None if tensor is None else split(tensor, most) for tensor in row]
    leaders = cast("Tensors", cut[0])
    blocks = [
        Block([[None if pieces is None else pieces[i]] for pieces in cut], leader.numel())
        for i, leader in enumerate(leaders)
    ]
    return Part(blocks, [place])


def check_lengths(*columns: Column) -> None:
    """Raise ``ValueError`` unless all lists are equally long; nothing was changed yet."""
    for _ in zip(*columns, strict=True):
        pass


def check_shapes(*columns: Column) -> None:
    """Refuse tensors of another shape than the first of their place; nothing was changed yet.

    Blocks would pair their elements wrongly, and torch's fused kernels read past their ends.

    Raises:
        ValueError: There is such a tensor.
    """
    shapes = [tensor.shape for tensor in cast("Tensors", columns[0])]
    for column in columns[1:]:
        found = [t if t is None else t.shape for t in column]
        if found == shapes:
            continue
        for place, (wanted, got) in enumerate(zip(shapes, found, strict=True)):
            if got is not None and got != wanted:
                raise ValueError(
                    message(
                        f"A gradient or state of shape {tuple(got)} was given for parameter "
                        f"{place} of shape {tuple(wanted)}",
                        "Gradients and state have the shapes of their parameters",
                        "Load a checkpoint of the same model, its parameters in the same order",
                    )
                )


def regular(*columns: Column) -> tuple[list[list[Any]], list[int]]:
    """Take out the places whose tensors can be walked through in the order of their memory.

    Returns:
        The columns, contiguous (dense tensors in another order, such as channels_last, are views
        of their memory), without the places that are returned next to them.
    """
    if all(map(_are_contiguous, columns)):
        return [list(column) for column in columns], []
    kept: list[list[Any]] = [[] for _ in columns]
    odd: list[int] = []
    for place in range(len(columns[0])):
        row = _in_memory_order([column[place] for column in columns])
        if row is None:
            odd.append(place)
            continue
        for column, tensor in zip(kept, row, strict=True):
            column.append(tensor)
    return kept, odd


def _are_contiguous(column: Column) -> bool:
    tensors = [tensor for tensor in column if tensor is not None]
    return _are_plain(tensors) and all(map(torch.Tensor.is_contiguous, tensors))


def _are_plain(tensors: Tensors) -> bool:
    kinds = {(tensor.layout, tensor.dtype) for tensor in tensors}
    return all(layout is torch.strided and dtype.is_floating_point for layout, dtype in kinds)


def _in_memory_order(row: list[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    tensors = [tensor for tensor in row if tensor is not None]
    if not _are_plain(tensors):
        return None
    if all(tensor.is_contiguous() for tensor in tensors):
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
