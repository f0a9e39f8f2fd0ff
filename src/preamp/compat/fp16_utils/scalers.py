# SPDX-License-Identifier: BSD-3-Clause
"""The stand-alone loss scalers of ``apex.fp16_utils``, older than the one of ``apex.amp``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from preamp.kernels import backend


class _Scaling:
    """What both scalers do with the scale they have."""

    def __init__(self, scale: float = 1) -> None:
        """Start with ``scale``, the factor of the loss."""
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: tuple[torch.Tensor | None, ...], grad_out: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Return ``grad_in``, the gradients at a module's inputs, times the scale; a backward hook.

        ``None`` among them stays; the other arguments are ignored.
        """
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward on ``loss`` times the scale.

        Args:
            loss: Scalar tensor. A half one is widened first, as the product may not fit it.
            retain_graph: As in ``Tensor.backward``.
        """
        wide = loss if loss.dtype is torch.float64 else loss.float()
        scaled: Any = wide * self.loss_scale
        scaled.backward(retain_graph=retain_graph)


class LossScaler(_Scaling):
    """A constant loss scale.

    Attributes:
        cur_scale: The scale.
    """

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: a constant scale does not look for overflow. ``params`` is ignored."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Change nothing. ``overflow`` is ignored."""


class DynamicLossScaler(_Scaling):
    """Halves on overflow, never below 1, and doubles after a run of clean updates.

    There is no ceiling: a scale too large overflows and comes down again.

    Attributes:
        cur_scale: The scale.
        cur_iter: Updates so far.
        last_overflow_iter: Number of the latest update with an overflow; -1 if there was none.
        scale_factor: What the scale is multiplied or divided by.
        scale_window: Updates without overflow before the scale grows.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        """Start.

        Args:
            init_scale: First scale.
            scale_factor: What the scale is multiplied or divided by.
            scale_window: Updates without overflow before the scale grows.
        """
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a gradient of ``params`` has an infinite or nan value. Synchronises once.

        Values are looked at, not their sum, which may overflow where they do not.
        Parameters without a gradient are passed over.
        """
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return False
        return bool(backend().census(grads, grads[0].device).found_inf.item())

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        return bool(backend().census([x], x.device).found_inf.item())

    def update_scale(self, overflow: bool) -> None:
        """Adjust the scale to whether the latest gradients overflowed."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
