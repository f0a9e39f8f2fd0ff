# SPDX-License-Identifier: BSD-3-Clause
"""The elements of a weight that one rank updates, where ranks share an optimizer's work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from preamp.core.errors import bad_state
from preamp.core.tensors import in_memory_order, memory_order


@dataclass(slots=True)
class Gate:
    """Open while an optimizer steps: else a part of a gradient might be taken for all of it."""

    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor, in the order of its memory."""

    start: int  # the first
    stop: int  # one after the last
    gate: Gate  # when a gradient's part may be read

    def of(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The elements as a vector: a view wherever ``tensor`` has the strides of ``like``."""
        if tensor.stride() != like.stride():
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor.detach())
        return in_memory_order(tensor)[self.start : self.stop]

    def check_readable(self, name: str) -> None:
        """Raise `PreampStateError` unless the optimizer steps."""
        if not self.gate.is_open:
            raise bad_state(
                f"The gradient of the master of {name!r} was read, of which this rank has a part",
                "Between backward and step the whole gradient is that of the model's "
                "parameter; parts are the optimizer's",
                "Clip with preamp.clip_grad_norm_(optimizer, max_norm), which knows the whole "
                "gradients' norm",
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Which elements of a tensor a part is."""

    shape: tuple[int, ...]  # of the tensor
    order: tuple[int, ...]  # its dimensions in the order of memory, the slowest first
    start: int  # in that order, the first
    stop: int  # one after the last

    @classmethod
    def of(cls, part: Part, whole: torch.Tensor) -> Span:
        """That of a ``part`` of ``whole``."""
        return cls(tuple(whole.shape), memory_order(whole), part.start, part.stop)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def row(self) -> int:
        """Elements of a row of the tensor, one index of its first dimension."""
        return math.prod(self.shape[1:])

    @property
    def first_row(self) -> int:
        """The first row of the tensor that it has."""
        return self.start // self.row

    @property
    def rows(self) -> int:
        """How many rows it has, if `has_whole_rows`."""
        return self.elements // self.row

    @property
    def has_whole_rows(self) -> bool:
        """Whether it begins and ends where rows of the tensor do."""
        return self.order[0] == 0 and self.start % self.row == 0 and self.stop % self.row == 0

    def shaped(self, part: torch.Tensor) -> torch.Tensor:
        """The vector ``part`` as those rows: a view."""
        lengths = [self.rows, *(self.shape[dim] for dim in self.order[1:])]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return part.view(lengths).permute(back)

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as a vector in the order of memory."""
        return rows.permute(self.order).reshape(-1)
