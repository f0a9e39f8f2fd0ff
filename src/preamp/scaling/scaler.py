# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling: the rules, and the scaler of one loss.

The dynamic rule is the one of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2,
in the form Apex gave it: halve on overflow, double after ``growth_interval`` clean updates in a
row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from preamp.core.errors import message
from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.core.tensors import host_reaches
from preamp.core.torch_private.loss_scale import UPDATES_SCALE_ON, clamp_, update_scale_

SMALLEST_SCALE = 2.0**-24
"""Where a dynamic scale stops if no floor was given. float16 values below this vanish, so a
smaller scale could not bring any gradient back into range."""

_LARGEST_SCALE, _LARGEST_COUNT = 2.0**127, 2**31 - 1  # that their tensors hold


def larger(one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """The larger of two flags of overflow, on the device of the first; there may be one only."""
    return one if other is None else torch.maximum(one, other.to(one.device))


class ScaleState(NamedTuple):
    """What a rule changes: tensors, so that adjusting needs no host synchronisation."""

    scale: torch.Tensor  # float32 scalar, the factor of the loss
    growth_tracker: torch.Tensor  # int32 scalar, clean updates since the last overflow or growth


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
    """Back off on overflow, grow after a run of clean updates."""

    init_scale: float = 2.0**16  # factor to start with
    growth_factor: float = 2.0  # multiplier when ``growth_interval`` updates in a row were clean
    backoff_factor: float = 0.5  # multiplier on overflow
    growth_interval: int = 2000  # clean updates before growth
    # floor that backing off never goes below; ``None`` for `SMALLEST_SCALE`
    min_scale: float | None = None
    max_scale: float = 2.0**24  # ceiling that growth never goes above
    is_dynamic: bool = True

    @property
    def floor(self) -> float:
        """The scale that backing off never goes below."""
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    @property
    def is_usual(self) -> bool:
        """Whether torch's operation takes these numbers, and does what `adjust` does."""
        grown = self.max_scale * self.growth_factor
        return 0 < self.growth_interval <= _LARGEST_COUNT and grown <= _LARGEST_SCALE

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> ScaleState:
        """Return the state after an update, clean where the float32 scalar ``found_inf`` is 0.

        The scale is between floor and ceiling then, wherever a script has set it.
        """
        overflow = found_inf != 0
        tracker = torch.where(overflow, 0, state.growth_tracker + 1)
        grows = tracker >= self.growth_interval
        grown = torch.where(grows, state.scale * self.growth_factor, state.scale)
        scale = torch.where(overflow, state.scale * self.backoff_factor, grown)
        return ScaleState(
            scale=scale.clamp(self.floor, self.max_scale),
            growth_tracker=torch.where(grows, 0, tracker).to(state.growth_tracker.dtype),
        )


ScaleRule = StaticScale | DynamicScale
"""Either of the two rules."""


class LossScaler:
    """Scale of one loss, with all state in device tensors."""

    def __init__(self, rule: ScaleRule, device: torch.device | str = "cpu") -> None:
        """Start at the rule's initial scale, or the bound next to it."""
        start = rule.init_scale
        if isinstance(rule, DynamicScale):
            start = max(min(start, rule.max_scale), rule.floor)
        # float32 scalar tensor; scripts set it by `set_scale`
        self.scale = torch.tensor(start, dtype=torch.float32, device=device)
        # int32 scalar tensor, clean updates since the last overflow or growth; scripts set it by
        # `set_clean_steps`
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # float32 scalar tensor; set by `record`, consumed by `update`. It stays set until an
        # update looks at it, so a delayed check loses nothing.
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.device = self.scale.device  # where all of these live
        self._has_recorded = False  # anything since the latest update
        self.generation = 0  # counts changes of the scale as far as the host knows of them
        self.rule = rule

    @property
    def rule(self) -> ScaleRule:
        """How the scale reacts; replaceable, the record itself is frozen."""
        return self._rule

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self._rule = rule
        self.is_dynamic = rule.is_dynamic  # whether overflows are looked for and acted on
        # Whether it is the static scale 1, which needs no arithmetic
        self.is_identity = isinstance(rule, StaticScale) and rule.init_scale == 1.0
        self._stay_below_interval()

    def _stay_below_interval(self) -> None:
        """Let the next clean update grow the scale where as many have been counted already.

        torch's operation grows where the count is equal, and would not any more before an overflow.
        """
        if isinstance(self._rule, DynamicScale):
            self.growth_tracker.clamp_(max=max(math.ceil(self._rule.growth_interval) - 1, 0))

    def scale_loss(self, loss: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``loss`` in float32 (float64 stays) times the scale; differentiable.

        ``scale`` is a copy of it that nobody changes before the backward, made here if left out.
        """
        wide = loss if loss.dtype is torch.float64 else loss.float()
        if self.is_identity:
            return wide
        return wide * (self.scale.clone() if scale is None else scale).to(loss.device)

    def record(self, found_inf: torch.Tensor, *, forgets: bool = False) -> None:
        """Remember an overflow until the next `update`. Mutates ``found_inf`` of the scaler.

        What was recorded before counts too, unless it ``forgets``.
        """
        if forgets:
            self.found_inf.zero_()
        own = self.found_inf
        torch.maximum(own, found_inf.to(own.device, own.dtype), out=own)
        self._has_recorded = True

    def update(self) -> torch.Tensor:
        """`react`, and return a float32 scalar: 1.0 if the step is skipped."""
        found_inf = self.found_inf.clone() if self.is_dynamic else torch.zeros_like(self.found_inf)
        self.react()
        return found_inf

    def react(self) -> None:
        """Adjust to what was recorded, not synchronising."""
        self.reaction()()

    def reaction(self) -> Callable[[], None]:
        """What adjusts to what was recorded, once, however often it is called."""
        rule, generation, done = self._rule, self.generation + 1, list[object]()
        act: Callable[..., object]
        if not isinstance(rule, DynamicScale):
            act, given = self.growth_tracker.add_, (1,)
        elif rule.is_usual and self.device.type in UPDATES_SCALE_ON:
            growth, backoff = c_float(rule.growth_factor).value, c_float(rule.backoff_factor).value
            interval, act = math.ceil(rule.growth_interval), update_scale_
            given = self.scale, self.growth_tracker, self.found_inf, growth, backoff, interval
        else:
            act = self._take
            given = rule.adjust(ScaleState(self.scale, self.growth_tracker), self.found_inf)

        def adjust() -> None:
            if not done:  # by `map`, so that no signal comes between the act and the note of it
                done.extend(map(act, *zip(given, strict=True)))
            if isinstance(rule, DynamicScale):
                clamp_(self.scale, rule.floor, rule.max_scale)
            if self._has_recorded or not host_reaches(self.found_inf):  # a graph may have, unseen
                self.found_inf.zero_()
            self._has_recorded = False
            self.generation = generation

        return adjust

    def _take(self, scale: torch.Tensor, growth_tracker: torch.Tensor) -> None:
        self.scale.copy_(scale)
        self.growth_tracker.copy_(growth_tracker)

    def coming_scale(self) -> Callable[[], float]:
        """What tells the scale once what is recorded now is acted on; only that synchronises."""
        scale = self.scale.clone()
        if not self._has_recorded:
            return partial(float, scale)
        rule, found_inf = self.rule, self.found_inf.clone()
        state = ScaleState(scale, self.growth_tracker.clone())

        def read() -> float:
            has_overflowed = bool(found_inf != 0)
            return float(rule.adjust(state, found_inf).scale if has_overflowed else scale)

        return read

    def value(self) -> float:
        """Return the scale as a Python float. Synchronises."""
        return float(self.scale.item())

    def set_scale(self, value: float) -> None:
        """Set the scale by hand; a static scaler keeps it, a dynamic one goes on from it.

        Outside of the bounds it stays until the next reaction.
        """
        self.scale.fill_(value)
        self.generation += 1
        if isinstance(self.rule, StaticScale):
            self.rule = StaticScale(init_scale=value)

    def set_clean_steps(self, number: int) -> None:
        """Set by hand how many updates since the last overflow or growth were clean."""
        self.growth_tracker.fill_(number)
        self._stay_below_interval()

    def state_dict(self) -> dict[str, float | int]:
        """Return scale and counter as plain numbers. Synchronises."""
        return read_numbers(self.late_state())

    def late_state(self) -> dict[str, LateNumber]:
        """The same with numbers not read from their devices yet."""
        return {
            "loss_scale": LateNumber(float, self.scale),
            "unskipped": LateNumber(int, self.growth_tracker),
        }

    @staticmethod
    def read_state(state: Mapping[str, float | int]) -> tuple[float, int]:
        """Return the scale and the counter in ``state``, or raise ``ValueError``."""
        try:
            scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
            if not (0 < scale <= _LARGEST_SCALE and 0 <= unskipped <= _LARGEST_COUNT):
                raise ValueError("out of range")
            return scale, unskipped
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
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
        """
        scale, unskipped = self.read_state(state)
        if self.is_dynamic:
            self.set_scale(scale)
        self.set_clean_steps(unskipped)
        self.found_inf.zero_()
