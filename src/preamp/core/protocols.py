# SPDX-License-Identifier: BSD-3-Clause
"""What lower rooms ask of higher ones, as types."""

from __future__ import annotations

from typing import Protocol

import torch


class MasterLookup(Protocol):
    """Finds the float32 master of a half parameter."""

    @property
    def has_masters(self) -> bool:
        """Whether there is any master at all."""
        ...

    def load_exact(self, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """Set the master of ``half``; returns what to round into it, or ``None``."""
        ...

    def exact_value(self, half: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 value of ``half`` as a checkpoint should hold it, or ``None``."""
        ...
