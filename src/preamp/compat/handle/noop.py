# SPDX-License-Identifier: BSD-3-Clause
"""The handle of a script that turned amp off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from preamp.compat.handle.optim_wrapper import OptimWrapper
from preamp.scaling import LossScaler, StaticScale


class NoOpHandle:
    """The handle of ``init(enabled=False)``: the same methods, without effect."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def scales_losses(self) -> bool:
        """Return False."""
        return False

    def new_scaler(self, device: torch.device) -> LossScaler:
        """Make the null object of scalers."""
        return LossScaler(StaticScale(), device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` so that ``scale_loss`` exists; losses pass through unchanged."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[torch.Tensor]:
        """Yield ``loss`` itself."""
        return nullcontext(loss)

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """A new empty dict."""
        return {}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Do nothing."""

    def clear_cache(self) -> None:
        """Do nothing."""

    def _clear_cache(self) -> None:
        pass

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        pass

    def deactivate(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        pass
