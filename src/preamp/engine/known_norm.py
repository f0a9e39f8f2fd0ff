# SPDX-License-Identifier: BSD-3-Clause
"""The norm that a census took along, for as long as the gradients stay what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.core.tensors import version_of


class KnownNorm:
    """Spares clipping a pass over the gradients.

    It is of the scaled gradients, before they are unscaled. A factor that is a power of two, as
    loss scales are, makes no difference to when it is applied.
    """

    def __init__(self, norm: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Note a norm.

        Args:
            norm: float32 scalar, over all of ``grads``.
            grads: As they were read, still scaled.
        """
        self._norm = norm
        self._grads = grads
        self._versions: dict[int, int] = {}
        self._factors: Sequence[torch.Tensor] = ()

    def commit(self, factor: torch.Tensor | None, pending: Sequence[torch.Tensor]) -> None:
        """The gradients have been unscaled by ``factor``, or will be where they are used.

        Args:
            factor: float32 scalar, or ``None`` for 1.
            pending: The same for half gradients, on their devices.
        """
        self._factors = pending
        if factor is not None:
            self._norm = self._norm * factor.to(self._norm.device)
        self._versions = {id(grad): version_of(grad) for grad in self._grads}

    def of(
        self, grads: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The norm of these gradients, if it is the one that is known.

        Args:
            grads: All of them, unscaled or half.
            factors: What unscales the half ones.
        """
        if not self._is_sound(grads) or len(grads) != len(self._versions):
            return None
        if any(self._versions.get(id(grad)) != version_of(grad) for grad in grads):
            return None
        # Others mean that they were clipped, for another optimizer that has the same masters.
        committed = {id(factor) for factor in self._factors}
        return self._norm if all(id(factor) in committed for factor in factors) else None

    def _is_sound(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether the squares of scaled gradients cannot have overflowed; float16 ones cannot."""
        if self._norm.device.type == "cpu":
            return bool(torch.isfinite(self._norm))
        return all(grad.dtype is torch.float16 for grad in grads)
