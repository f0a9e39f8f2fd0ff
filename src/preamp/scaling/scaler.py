# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling: the rules, the scaler of one loss, and scalers that have yet to react.

The dynamic rule is the one of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2,
in the form Apex gave it: halve on overflow, double after ``growth_interval`` clean updates in a
row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from preamp.core.errors import message
from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.core.tensors import host_reaches, is_capturing
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

    def bounds(self, scale: float) -> bool:
        """Whether ``scale`` is between floor and ceiling."""
        return self.floor <= scale <= self.max_scale

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> ScaleState:
        """Return the state after an update, clean where the float32 scalar ``found_inf`` is 0."""
        overflow = found_inf != 0
        # A scale set by hand below the floor is not raised by an overflow.
        lower = torch.minimum(
            state.scale, (state.scale * self.backoff_factor).clamp(min=self.floor)
        )
        tracker = torch.where(overflow, 0, state.growth_tracker + 1)
        # Not equality, as torch and Apex have it: an interval that was lowered below the count
        # would hold the scale until the next overflow.
        grows = tracker >= self.growth_interval
        higher = torch.where(
            grows, (state.scale * self.growth_factor).clamp(max=self.max_scale), state.scale
        )
        return ScaleState(
            scale=torch.where(overflow, lower, higher),
            growth_tracker=torch.where(grows, 0, tracker).to(state.growth_tracker.dtype),
        )


ScaleRule = StaticScale | DynamicScale
"""Either of the two rules."""


class LossScaler:
    """Scale of one loss, with all state in device tensors."""

    def __init__(self, rule: ScaleRule, device: torch.device | str = "cpu") -> None:
        """Start at the rule's initial scale."""
        self._rule: ScaleRule = rule
        start = rule.init_scale
        if isinstance(rule, DynamicScale):
            start = max(min(start, rule.max_scale), rule.min_scale or 0.0)
        # float32 scalar tensor; scripts set it by `set_scale`
        self.scale = torch.tensor(start, dtype=torch.float32, device=device)
        # int32 scalar tensor, clean updates since the last overflow or growth; scripts set it by
        # `set_clean_steps`
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # float32 scalar tensor; set by `record`, consumed by `update`. It stays set until an
        # update looks at it, so a delayed check loses nothing.
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._has_recorded = False  # anything since the latest update
        self.generation = 0  # counts changes of the scale as far as the host knows of them
        # Whether scale and counter may be where a script has set them, and the rule never does
        self._has_odd_scale = isinstance(rule, DynamicScale) and not rule.bounds(start)
        self._has_odd_count = False

    @property
    def rule(self) -> ScaleRule:
        """How the scale reacts; replaceable, the record itself is frozen."""
        return self._rule

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        old, self._rule = self._rule, rule
        if not isinstance(old, DynamicScale):
            self._has_odd_scale = self._has_odd_count = True
        elif isinstance(rule, DynamicScale):
            self._has_odd_scale |= rule.floor > old.floor or rule.max_scale < old.max_scale
            self._has_odd_count |= rule.growth_interval < old.growth_interval

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

        ``scale`` is a copy of it that nobody changes before the backward, made here if left out.
        """
        wide = loss if loss.dtype is torch.float64 else loss.float()
        if self.is_identity:
            return wide
        return wide * (self.scale.clone() if scale is None else scale).to(loss.device)

    def inverse(self) -> torch.Tensor:
        """Return ``1 / scale``, a new float32 scalar that later updates do not touch."""
        return self.scale.reciprocal()

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
        rule, generation = self.rule, self.generation + 1
        is_captured = is_capturing(self.device)  # and replayed after whatever a script will set
        is_odd = self._has_odd_scale or self._has_odd_count
        takes_operation = not (is_captured or is_odd) and self.device.type in UPDATES_SCALE_ON
        if takes_operation and isinstance(rule, DynamicScale) and rule.is_usual:
            return partial(self._adjust_in_place, rule, generation, [])
        state = rule.adjust(ScaleState(self.scale, self.growth_tracker), self.found_inf)

        def adjust() -> None:
            if state.scale is not self.scale:
                self.scale.copy_(state.scale)
            if host_reaches(state.growth_tracker):
                self.growth_tracker = state.growth_tracker
            else:  # a CUDA graph knows where it lies
                self.growth_tracker.copy_(state.growth_tracker)
            self._end_reaction(generation)
            self._has_odd_count &= is_captured  # else the formula has brought it below the interval

        return adjust

    def _adjust_in_place(
        self, rule: DynamicScale, generation: int, done: list[torch.Tensor]
    ) -> None:
        """Adjust by torch's own operation; ``done`` is empty until that has run."""
        if not done:
            numbers = (rule.growth_factor, rule.backoff_factor)
            growth, backoff = (c_float(number).value for number in numbers)
            given = (self.scale, self.growth_tracker, self.found_inf, growth, backoff)
            # By `map`, so that no signal comes between the operation and the note of it.
            done.extend(
                map(update_scale_, *zip((*given, math.ceil(rule.growth_interval)), strict=True))
            )
        clamp_(self.scale, rule.floor, rule.max_scale)
        self._end_reaction(generation)

    def _end_reaction(self, generation: int) -> None:
        if self._has_recorded or not host_reaches(self.found_inf):  # a graph may have, unseen
            self.found_inf.zero_()
        self._has_recorded = False
        self.generation = generation

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
        """Set the scale by hand; a static scaler keeps it, a dynamic one goes on from it."""
        rule = self.rule
        self._has_odd_scale = isinstance(rule, DynamicScale) and not rule.bounds(value)
        self.scale.fill_(value)
        self.generation += 1
        if isinstance(rule, StaticScale):
            self.rule = StaticScale(init_scale=value)

    def set_clean_steps(self, number: int) -> None:
        """Set by hand how many updates since the last overflow or growth were clean."""
        rule = self.rule
        self._has_odd_count = isinstance(rule, DynamicScale) and number >= rule.growth_interval
        self.growth_tracker.fill_(number)

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


@dataclass(slots=True, eq=False)
class _Late:
    """What this rank alone has found, while the gradients wait to be reduced."""

    scaler: LossScaler  # by whose scale they were multiplied
    # ``id`` of the sessions whose gradients have not been reduced since
    waits_for: set[int] = field(default_factory=set[int])
    # found in these; ``None`` once the reduction has shown it to all ranks
    found_inf: torch.Tensor | None = None
    is_due: bool = False  # whether the scale has to react, and not only to remember

    def settle(self, sessions: Iterable[object]) -> None:
        """The gradients of ``sessions`` are no longer those of this rank alone."""
        self.waits_for.difference_update(map(id, sessions))
        if not self.waits_for:
            self.found_inf = None


class Adjustments:
    """Loss scales that have yet to react, since other ranks do not know of an overflow yet.

    Ranks keep one scale because each reacts to what all have seen. What one has found in
    gradients that nobody has reduced stays out of its scaler: the reduction shows it to all, in
    whichever loss's backward that comes, or the script drops it with the gradients.
    """

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._late: dict[int, _Late] = {}

    def reaction(self, scaler: LossScaler) -> Callable[[], None]:
        """What lets ``scaler`` react to what was found since it last did, once."""
        late = self._late.get(id(scaler))
        if late is not None and not late.waits_for:
            del self._late[id(scaler)]
        return scaler.reaction()

    def later(
        self,
        scaler: LossScaler,
        sessions: Sequence[object],
        found_inf: torch.Tensor | None,
        *,
        is_due: bool = True,
    ) -> None:
        """Let ``scaler`` react with a later block, at the latest with the next step."""
        late = self._late.setdefault(id(scaler), _Late(scaler))
        late.waits_for.update(map(id, sessions))
        late.is_due |= is_due
        if late.found_inf is None:
            late.found_inf = found_inf
        else:
            late.found_inf = larger(late.found_inf, found_inf)

    def reduced(self, sessions: Sequence[object], found_inf: torch.Tensor | None) -> None:
        """All that ranks held of ``sessions`` has been reduced; all have found ``found_inf``."""
        own = set(map(id, sessions))
        for late in self._late.values():
            if own & late.waits_for:
                if found_inf is not None:
                    late.scaler.record(found_inf)
                late.settle(sessions)

    def dropped(self, sessions: Sequence[object]) -> None:
        """The script has dropped the gradients of ``sessions``; other ranks never know of them."""
        for late in self._late.values():
            late.settle(sessions)

    def catch_up(self, session: object) -> None:
        """``session`` takes a step: let all react that wait for it, or for nobody any more."""
        for late in tuple(self._late.values()):
            if not late.waits_for or id(session) in late.waits_for:
                del self._late[id(late.scaler)]
                if late.found_inf is not None:
                    late.scaler.record(late.found_inf)
                if late.is_due:
                    late.scaler.react()

    def forget(self) -> None:
        """Nothing waits any more: all gradients are gone."""
        self._late.clear()
