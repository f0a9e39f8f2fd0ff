# SPDX-License-Identifier: BSD-3-Clause
"""The stages of an optimizer's gradients within one training step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from preamp.engine.overflow import GradientNote
from preamp.scaling import LossScaler


class Stage(Enum):
    """Where an optimizer's gradients stand."""

    READY = "ready"
    SCALED = "scaled"
    UNSCALED = "unscaled"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a ``scale_loss`` block is going to do with the gradients of its backward.

    Attributes:
        scaler: The loss's scaler.
        will_delay: Leave them scaled (``delay_unscale``).
        may_reduce: A hook may reduce them over ranks.
    """

    scaler: LossScaler
    will_delay: bool = False
    may_reduce: bool = False


@dataclass(slots=True)
class Delayed:
    """The scale that gradients left scaled (``delay_unscale``) carry.

    Attributes:
        scaler: Whose scale it is.
        generation: The scaler's generation then; another one means another scale.
        inverse: What unscales them, a float32 scalar; ``None`` for the static scale 1.
        note: Of the latest backward that left any, and of those before it.
        has_gradients: Whether any gradient was left.
    """

    scaler: LossScaler
    generation: int
    inverse: torch.Tensor | None
    note: GradientNote
    has_gradients: bool = False

    def continues_with(self, scaler: LossScaler) -> bool:
        """Whether gradients of ``scaler`` can be added as they are."""
        return self.scaler is scaler and self.generation == scaler.generation
