# SPDX-License-Identifier: BSD-3-Clause
"""Loss-scaling rules: frozen records with a pure ``adjust``.

The rule is the one of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, in the
form Apex gave it: halve on overflow, double after ``growth_interval`` clean updates in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SMALLEST_SCALE = 2.0**-24
"""Where a dynamic scale stops if no floor was given. float16 values below this vanish, so a
smaller scale could not bring any gradient back into range."""


class ScaleState(NamedTuple):
    """What a rule changes: tensors, so that adjusting needs no host synchronisation.

    Attributes:
        scale: float32 scalar, the factor of the loss.
        growth_tracker: int32 scalar, clean updates since the last overflow or growth.
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticScale:
    """A constant factor. Overflows are not looked for; 1.0 is the null object of scaling."""

    init_scale: float = 1.0
    is_dynamic: bool = False

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> ScaleState:
        """Return ``state`` with the update counted."""
        del found_inf
        return ScaleState(state.scale, state.growth_tracker + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """Back off on overflow, grow after a run of clean updates.

    Attributes:
        init_scale: Factor to start with.
        growth_factor: Multiplier when ``growth_interval`` updates in a row were clean.
        backoff_factor: Multiplier on overflow.
        growth_interval: Clean updates before growth.
        min_scale: Floor that backing off never goes below; ``None`` for `SMALLEST_SCALE`.
        max_scale: Ceiling that growth never goes above.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float = 2.0**24
    is_dynamic: bool = True

    @property
    def floor(self) -> float:
        """The scale that backing off never goes below."""
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> ScaleState:
        """Return the state after one update.

        Args:
            state: Scale and tracker before.
            found_inf: float32 scalar, not zero if any gradient was infinite or nan.
        """
        overflow = found_inf != 0
        # A scale set by hand below the floor is not raised by an overflow.
        lower = torch.minimum(
            state.scale, (state.scale * self.backoff_factor).clamp(min=self.floor)
        )
        tracker = torch.where(overflow, 0, state.growth_tracker + 1)
        grows = tracker >= self.growth_interval  # the interval may have shrunk below it
        higher = torch.where(
            grows, (state.scale * self.growth_factor).clamp(max=self.max_scale), state.scale
        )
        return ScaleState(
            scale=torch.where(overflow, lower, higher),
            growth_tracker=torch.where(grows, 0, tracker).to(state.growth_tracker.dtype),
        )


ScaleRule = StaticScale | DynamicScale
"""Either of the two rules."""
