# SPDX-License-Identifier: BSD-3-Clause
"""The op table: what every back end computes, and in which precision.

A back end is a module under ``preamp.kernels`` with one function per op. Ops are stateless
arithmetic on lists of tensors; none of them reads a value back to the host. The reference back
end is the definition: the others agree with it bitwise, or within the ulps stated here.

Precision contract, for every op: load in the tensor's own dtype, compute in float32 (float64 for
float64 tensors), round once, to nearest even, on store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Census:
    """What one read of the gradients tells.

    Attributes:
        found_inf: float32 scalar, 1.0 if any value is infinite or nan, else 0.0.
        max_abs: float32, shape ``(n,)``: largest magnitude per tensor, in the order given;
            nan or inf marks the tensors that are not finite.
    """

    found_inf: torch.Tensor
    max_abs: torch.Tensor


class Ops(Protocol):
    """The functions a back end provides. None synchronises with the host."""

    name: str

    def census(self, grads: Tensors, device: torch.device) -> Census:
        """Read every gradient once.

        Overflow is decided by the largest magnitude, never by a sum: the float32 sum of finite
        values can overflow. Empty tensors count as zeros. Sparse tensors are judged by their
        values. The result lies on ``device``. Mutates nothing.
        """
        ...

    def scale_add_(
        self, grads: Tensors, factor: torch.Tensor | float, addends: Sequence[torch.Tensor | None]
    ) -> None:
        """``grad = grad * factor + addend`` in place, for each pair; no addend means zero.

        Args:
            grads: Mutated; any floating dtype, dense or sparse.
            factor: float32 scalar.
            addends: Same dtype and shape as their gradient, or ``None``.
        """
        ...

    def widen_add(
        self,
        halves: Tensors,
        factors: Sequence[torch.Tensor],
        addends: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Return ``float32(half) * factor + addend`` for each triple.

        Args:
            halves: Half gradients; not mutated.
            factors: One float32 scalar each.
            addends: float32 accumulators that may be overwritten with the result, or ``None``.
        """
        ...

    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        """``target = source`` rounded to the target's dtype, for each pair; mutates targets."""
        ...

    def l2norm(
        self, tensors: Tensors, factors: Sequence[torch.Tensor | None], device: torch.device
    ) -> torch.Tensor:
        """Return the float32 L2 norm over all ``tensor * factor``, a scalar on ``device``.

        Norms are per tensor first, then of the norms, as ``torch.nn.utils.clip_grad_norm_``
        does. float16 values cannot overflow it; float32 values above about 1e19 can.
        """
        ...


OP_NAMES = ("census", "scale_add_", "widen_add", "cast_copy_", "l2norm")
"""Every op of the table; a back end must have all of them."""
