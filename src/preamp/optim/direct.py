# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of parameters that the optimizer updates itself, without a master."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from preamp.kernels import Ops

Parameters = Iterable[torch.Tensor]


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

    def forget(self) -> None:
        """Drop what was set aside."""
        self._aside.clear()
