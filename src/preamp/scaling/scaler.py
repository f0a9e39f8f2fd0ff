# SPDX-License-Identifier: BSD-3-Clause
"""One loss scaler: a rule, and its state on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from preamp.core.errors import message
from preamp.scaling.records import DynamicScale, ScaleRule, ScaleState, StaticScale


class LossScaler:
    """Scale of one loss, with all state in device tensors.

    Attributes:
        rule: How the scale reacts; replaceable, the record itself is frozen.
        scale: float32 scalar tensor.
        growth_tracker: int32 scalar tensor, clean updates since the last overflow or growth.
        found_inf: float32 scalar tensor; set by `record`, consumed by `update`. It stays set
            until an update looks at it, so a delayed check loses nothing.
        generation: Counts changes of the scale as far as the host knows of them.
    """

    def __init__(self, rule: ScaleRule, device: torch.device | str = "cpu") -> None:
        """Start at the rule's initial scale.

        Args:
            rule: `StaticScale` or `DynamicScale`.
            device: Where the three tensors live.
        """
        self.rule: ScaleRule = rule
        start = rule.init_scale
        if isinstance(rule, DynamicScale):
            start = max(min(start, rule.max_scale), rule.min_scale or 0.0)
        self.scale = torch.tensor(start, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.generation = 0

    @property
    def device(self) -> torch.device:
        """Where scale and flags live."""
        return self.scale.device

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows are looked for and acted on."""
        return self.rule.is_dynamic

    @property
    def is_identity(self) -> bool:
        """Whether this is the static scale 1, which needs no arithmetic. Never synchronises."""
        return isinstance(self.rule, StaticScale) and self.rule.init_scale == 1.0

    def scale_loss(self, loss: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``loss`` in float32 (float64 stays) times the scale; differentiable.

        Args:
            loss: Floating tensor.
            scale: A copy of the scale that nobody changes before the backward, which keeps it;
                made here if left out.
        """
        wide = loss if loss.dtype is torch.float64 else loss.float()
        if self.is_identity:
            return wide
        return wide * (self.scale.clone() if scale is None else scale).to(loss.device)

    def inverse(self) -> torch.Tensor:
        """Return ``1 / scale``, a new float32 scalar that later updates do not touch."""
        return self.scale.reciprocal()

    def record(self, found_inf: torch.Tensor) -> None:
        """Remember an overflow until the next `update`. Mutates ``found_inf`` of the scaler."""
        self.found_inf.copy_(torch.maximum(self.found_inf, found_inf.to(self.device)))

    def update(self) -> torch.Tensor:
        """Adjust the scale to what was recorded since the last update.

        Returns:
            float32 scalar tensor, 1.0 if the step must be skipped. Does not synchronise.
        """
        found_inf = self.found_inf.clone()
        state = self.rule.adjust(ScaleState(self.scale, self.growth_tracker), found_inf)
        self.scale.copy_(state.scale)
        self.growth_tracker.copy_(state.growth_tracker)
        self.found_inf.zero_()
        self.generation += 1
        return found_inf if self.is_dynamic else torch.zeros_like(found_inf)

    def value(self) -> float:
        """Return the scale as a Python float. Synchronises."""
        return float(self.scale.item())

    def set_scale(self, value: float) -> None:
        """Set the scale by hand; a static scaler keeps it, a dynamic one goes on from it."""
        self.scale.fill_(value)
        self.generation += 1
        if isinstance(self.rule, StaticScale):
            self.rule = StaticScale(init_scale=value)

    def state_dict(self) -> dict[str, float | int]:
        """Return scale and counter as plain numbers. Synchronises."""
        return {"loss_scale": self.value(), "unskipped": int(self.growth_tracker.item())}

    @staticmethod
    def read_state(state: Mapping[str, float | int]) -> tuple[float, int]:
        """Return the scale and the counter in ``state``.

        Raises:
            ValueError: ``state`` lacks an entry or has one that is no usable number.
        """
        try:
            scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
            if not (math.isfinite(scale) and scale > 0 and unskipped >= 0):
                raise ValueError("out of range")
            return scale, unskipped
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                message(
                    f"A loss scaler's state {state!r} cannot be read",
                    "Needed are the numbers 'loss_scale' (above 0) and 'unskipped' (from 0)",
                    "Pass what state_dict() returned",
                )
            ) from error

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take over scale and counter; nothing changes if an entry is missing or unusable.

        A static scale stays what it was told to be; only its counter is taken.

        Raises:
            ValueError: ``state`` lacks an entry or has one that is no usable number.
        """
        scale, unskipped = self.read_state(state)
        if self.is_dynamic:
            self.set_scale(scale)
        self.growth_tracker.fill_(unskipped)
        self.found_inf.zero_()
