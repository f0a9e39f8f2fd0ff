# SPDX-License-Identifier: BSD-3-Clause
"""The elements of a weight that one rank updates, where ranks share an optimizer's work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from preamp.core.errors import bad_state
from preamp.core.tensors import in_memory_order, memory_order, store_grad, stored_grad
from preamp.kernels import Ops


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


class Holding:
    """How much of a weight its master has, and the whole gradient.

    The gradient is whole in any case: its norm is what is clipped by, and under ``no_sync`` it is
    each rank's own.
    """

    __slots__ = ("_half", "_master", "_whole", "gathered", "name", "part")

    def __init__(self, master: torch.Tensor, half: torch.Tensor, name: str) -> None:
        """Let ``master`` have all of ``half``, which messages call ``name``."""
        self.part: Part | None = None  # the elements that the master has, or ``None`` for all
        self._master = master
        self._half = half
        self.name = name
        self._whole: torch.Tensor | None = None
        self.gathered: torch.Tensor | None = None  # all of the master, while somebody needs it

    def value(self) -> torch.Tensor:
        """All of the master; `PreampStateError` where other ranks have the rest of it."""
        if self.part is None or self.gathered is not None:
            return self._master if self.gathered is None else self.gathered
        raise bad_state(
            f"state_dict() was called on a model whose masters ranks share, {self.name!r} for one",
            "This rank does not know the float32 values of the others",
            "Call preamp.parallel.full_state_dicts(model, optimizer) on every rank",
        )

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of the weight, or of what has its shape, that the master has."""
        return tensor if self.part is None else self.part.of(tensor, self._half)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The whole unscaled float32 gradient, as far as it is made."""
        return stored_grad(self._master) if self.part is None else self._whole

    def keep(self, grad: torch.Tensor | None) -> None:
        """Let ``grad`` be that gradient."""
        if self.part is not None:
            self._whole, grad = grad, None
        store_grad(self._master, grad)

    def keep_part(self, part: Part | None, value: torch.Tensor) -> None:
        """Let the master have ``part`` of the weight, or all, in the storage of ``value``."""
        gradient = self.gradient
        self.keep(None)
        self.part, self._master.data = part, value
        self.keep(gradient)

    def own_gradient(
        self,
        pending: tuple[torch.Tensor, torch.Tensor] | None,
        make: Callable[[], torch.Tensor | None],
        ops: Ops,
    ) -> torch.Tensor | None:
        """The part of the gradient that the master's optimizer reads; made once for each step.

        ``pending`` is a half gradient that is not in `gradient` yet, and its factor; ``make``
        brings `gradient` up to date. Raises `PreampStateError` unless the optimizer is stepping.
        """
        is_there = stored_grad(self._master) is not None
        if self.part is None or is_there or (pending is None and self._whole is None):
            return stored_grad(self._master)
        self.part.check_readable(self.name)
        if pending is not None and self._whole is None:  # nobody here needs the rest of it
            wide = ops.widen_add([self.own(pending[0])], [pending[1]], [None])[0]
            store_grad(self._master, wide)
        elif (whole := make()) is not None:
            store_grad(self._master, self.own(whole))
        return stored_grad(self._master)
