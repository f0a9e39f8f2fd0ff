# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of parameters that the optimizer updates itself, without a master."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from preamp.core.tensors import version_of
from preamp.kernels import Ops

Parameters = Iterable[torch.Tensor]


def has_nonzero(grad: torch.Tensor) -> bool:
    """Whether ``grad`` has a value other than zero; nan counts. Synchronises."""
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


class DirectGradients:
    """Keeps unscaled gradients apart while a backward adds scaled ones.

    Inside ``scale_loss`` a parameter's ``grad`` holds that backward's contribution alone; on the
    way out it is unscaled and what was there before is added. So losses with different scales
    can be summed, and an exception in the body loses nothing.
    """

    def __init__(self, ops: Ops) -> None:
        """Start with nothing set aside."""
        self._ops = ops
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}  # of the gradients as the last merge left them

    @property
    def holds_any(self) -> bool:
        """Whether a gradient is set aside."""
        return bool(self._aside)

    def set_aside(self, params: Parameters) -> None:
        """Take the gradients of ``params`` away. Mutates ``param.grad`` (to ``None``)."""
        for param in params:
            if param.grad is not None:
                self._aside[id(param)] = (param, param.grad)
                param.grad = None

    def put_back(self, params: Parameters) -> None:
        """Restore what `set_aside` took, dropping what came since."""
        for param in params:
            param.grad = None
        for param, grad in self._aside.values():
            param.grad = grad
        self._aside.clear()

    def merge(self, params: Parameters, factor: torch.Tensor | None) -> None:
        """Unscale the new gradients and add the old ones: ``grad = grad * factor + aside``.

        Args:
            params: Parameters whose backward has ended; their ``grad`` is mutated in place.
            factor: float32 scalar, or ``None`` where there is nothing to unscale.
        """
        news: list[torch.Tensor] = []
        olds: list[torch.Tensor | None] = []
        for param in params:
            if param.grad is None:
                continue
            aside = self._aside.pop(id(param), None)
            if aside is not None or factor is not None:
                news.append(param.grad)
                olds.append(None if aside is None else aside[1])
        with torch.no_grad():
            self._ops.scale_add_(news, 1.0 if factor is None else factor, olds)
        for param, grad in self._aside.values():  # no new gradient: the old one comes back
            param.grad = grad
        self._aside.clear()
        for param in params:
            if param.grad is not None:
                self._versions[id(param)] = version_of(param.grad)

    def holds_gradient(self, params: Parameters) -> bool:
        """Whether any of ``params`` has a gradient that was not zeroed since the last `merge`.

        Values are looked at, and the device synchronised with, only where somebody wrote to a
        gradient in the meantime.
        """
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if version_of(grad) == self._versions.get(id(param)) or has_nonzero(grad):
                return True
        return False

    def forget(self) -> None:
        """Drop what was set aside."""
        self._aside.clear()
