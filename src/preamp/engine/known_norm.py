# SPDX-License-Identifier: BSD-3-Clause
"""The norm that a census took along, for as long as the gradients stay what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.core.ranks import has_process_group
from preamp.core.tensors import is_sharded, versions_of


class KnownNorm:
    """Spares clipping a pass over the gradients.

    It is of the scaled gradients, before they are unscaled. A factor that is a power of two, as
    loss scales are, makes no difference to when it is applied.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._norm: torch.Tensor | None = None
        self._grads: Sequence[torch.Tensor] = ()
        self._versions: dict[int, int] = {}
        self._factors: Sequence[torch.Tensor] = ()
        self._clips = False
        self._clipped = False

    @property
    def is_wanted(self) -> bool:
        """Whether the script has clipped in this step or in the latest one."""
        return self._clips or self._clipped

    @property
    def is_of_sharded(self) -> bool:
        """Whether it is of sharded gradients, which were reduced when they were sharded."""
        return bool(self._grads) and all(map(is_sharded, self._grads))

    def note(self, norm: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Note a norm, of no use before `commit`.

        Args:
            norm: float32 scalar, over all of ``grads``.
            grads: As they were read, still scaled.
        """
        self._norm = norm
        self._grads = grads

    def commit(
        self, factor: torch.Tensor | None, pending: Sequence[torch.Tensor], *, is_reduced: bool
    ) -> None:
        """The gradients have been unscaled by ``factor``, or will be where they are used.

        Args:
            factor: float32 scalar, or ``None`` for 1.
            pending: The same for half gradients, on their devices.
            is_reduced: Whether the gradients have certainly been reduced over ranks.
        """
        if self._norm is None:
            return
        if has_process_group() and not is_reduced:
            # The script may do it from now on, and torch.distributed leaves versions as they are.
            self.forget()
            return
        if factor is not None:
            self._norm = self._norm * factor.to(self._norm.device)
        self._versions = _versions_by_id(self._grads)
        self._factors = pending

    def forget(self) -> None:
        """The gradients are going, or will be others; hold none of them any longer."""
        self._norm = None
        self._grads = self._factors = ()
        self._versions = {}

    def end_step(self) -> None:
        """A step has used the gradients up."""
        self.forget()
        self._clipped, self._clips = self._clips, False

    def take(
        self, grads: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The norm of these gradients, if it is the one that is known; they will be clipped by it.

        Args:
            grads: All of them, unscaled or half.
            factors: What unscales the half ones.
        """
        self._clips = True
        norm = self._norm if self._is_of(grads, factors) else None
        self.forget()  # clipped gradients have another
        return norm

    def memo(
        self, grads: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, bool, bool]:
        """What to keep to go on in another process; arguments as `take`."""
        return self._norm if self._is_of(grads, factors) else None, self._clips, self._clipped

    def recall(
        self,
        memo: tuple[torch.Tensor | None, bool, bool],
        grads: Sequence[torch.Tensor],
        factors: Sequence[torch.Tensor],
    ) -> None:
        """Go on from there; the gradients are in place again."""
        self.forget()
        norm, self._clips, self._clipped = memo
        if norm is not None:
            self._norm, self._grads, self._factors = norm, grads, factors
            self._versions = _versions_by_id(grads)

    def _is_of(self, grads: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> bool:
        if self._norm is None or not _is_sound(self._norm, grads):
            return False
        if _versions_by_id(grads) != self._versions:
            return False
        # Others mean that they were clipped, for another optimizer that has the same masters.
        return set(map(id, factors)) <= set(map(id, self._factors))


def _versions_by_id(grads: Sequence[torch.Tensor]) -> dict[int, int]:
    return dict(zip(map(id, grads), versions_of(grads), strict=True))


def _is_sound(norm: torch.Tensor, grads: Sequence[torch.Tensor]) -> bool:
    """Whether the squares of scaled gradients cannot have overflowed; float16 ones cannot."""
    if norm.device.type == "cpu":
        return bool(torch.isfinite(norm))
    return all(grad.dtype is torch.float16 for grad in grads)
