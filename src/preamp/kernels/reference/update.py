# SPDX-License-Identifier: BSD-3-Clause
"""What the update rules share: widening, guarded stores, bias corrections, norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.ops import Tensors
from preamp.kernels.update import Scalar, Update


class Slot:
    """One place of the lists: a parameter with its gradient, loaded for the computation."""

    p: torch.Tensor  # the parameter, widened
    g: torch.Tensor  # the gradient, widened and multiplied by ``inv_scale``
    # the state tensors, widened, in the order of the op's arguments
    state: tuple[torch.Tensor, ...]

    def scalar(self, value: Any) -> Any:
        """A hyper-parameter as the computation takes it: tensors in its dtype and device."""
        if isinstance(value, torch.Tensor):
            return value.to(self.p.device, self.p.dtype)
        return value

    def number(self, value: Scalar) -> torch.Tensor:
        """The same as a tensor; a number becomes a 0-dim one."""
        found = self.scalar(value)
        return found if isinstance(found, torch.Tensor) else self.p.new_full((), found)

    def bias_correction(self, beta: float, step: int | torch.Tensor) -> Scalar:
        """``1 - beta ** step``.

        On the device as ``-expm1(step * log(beta))``: the plain form would lose half the digits
        of ``1 - 0.999`` in float32.
        """
        if not isinstance(step, torch.Tensor):
            return 1.0 - beta**step
        log = math.log(beta) if beta > 0 else -math.inf
        return -torch.expm1(self.scalar(step) * log)

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """Round new values into parameter and kept state, then the parameter into its half."""
        raise NotImplementedError


class TensorSlot(Slot):
    """A slot of one whole tensor of any layout."""

    def __init__(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        half: torch.Tensor | None,
        update: Update,
    ) -> None:
        self._targets = (param, *state)
        self._half = half
        self._found_inf = update.found_inf
        dtype = math_dtype(param.dtype)
        self.p, self.g, *rest = (t.detach().to(dtype) for t in (param, grad, *state))
        if update.inv_scale is not None:
            self.g = self.g * self.scalar(update.inv_scale)
        self.state = tuple(rest)

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """See `Slot.store`."""
        for target, value in zip(self._targets, (p, *state), strict=False):
            self._store_one(target, value)
        if self._half is not None:
            self._store_one(self._half, self._targets[0])

    def keep(self, number: torch.Tensor) -> None:
        """Round ``number`` into the last tensor of the state, which has no other element."""
        self._store_one(self._targets[-1], number)

    def _store_one(self, target: torch.Tensor, value: torch.Tensor) -> None:
        target = target.detach()
        rounded = value.detach().to(target.dtype)
        if self._found_inf is not None:
            skip = self._found_inf.to(target.device) != 0
            rounded = torch.where(skip, target, rounded)
        target.copy_(rounded)


def slots(params: Tensors, grads: Tensors, *state: Tensors, update: Update) -> Iterator[TensorSlot]:
    """Load one place of the lists after the other."""
    halves = [None] * len(params) if update.halves is None else update.halves
    for param, grad, half, *rest in zip(params, grads, halves, *state, strict=True):
        yield TensorSlot(param, grad, tuple(cast("list[torch.Tensor]", rest)), half, update)


def both_nonzero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether both norms are larger than zero; a trust ratio means nothing otherwise."""
    return (a > 0) & (b > 0)
