# SPDX-License-Identifier: BSD-3-Clause
"""The stages of an optimizer's gradients within one training step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from preamp.scaling import LossScaler


class Stage(Enum):
    """Where an optimizer's gradients stand."""

    READY = "ready"
    SCALED = "scaled"
    UNSCALED = "unscaled"


@dataclass(frozen=True, slots=True)
class Delayed:
    """The scale that gradients left scaled (``delay_unscale``) carry."""

    scaler: LossScaler
    generation: int
    inverse: torch.Tensor | None

    def continues_with(self, scaler: LossScaler) -> bool:
        """Whether gradients of ``scaler`` can be added as they are."""
        return self.scaler is scaler and self.generation == scaler.generation
