# SPDX-License-Identifier: BSD-3-Clause
"""Where a value lies in a picture, and which values to name at its edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_LARGEST = 2.0**1000
"""Beyond it lies the end of every scale, so that no range or tick overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A range of values spread evenly over a length of 1, maybe after a logarithm.

    Attributes:
        low: Value at 0.
        high: Value at 1; above ``low``.
        transform: What is spread evenly, increasing: ``math.log2`` for a logarithmic scale.
        ticks: Values to name, with their names.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    transform: Callable[[float], float] = float

    def place(self, value: float) -> float:
        """Return where ``value`` lies, between 0 and 1; what is outside lies at the end."""
        low, high = self.transform(self.low), self.transform(self.high)
        return min(max((self.transform(value) - low) / (high - low), 0.0), 1.0)


def linear(low: float, high: float, spell: Callable[[float], str], count: int = 5) -> Scale:
    """Spread ``low`` to ``high``; a range of no width is made wider."""
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if not high > low:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    step = tick_step(high - low, count)
    values = multiples(low, high, step)
    return Scale(low=low, high=high, ticks=tuple((v, spell(v)) for v in values))


def powers_of_two(low: float, high: float, spell: Callable[[int], str], count: int = 5) -> Scale:
    """Spread positive values by their logarithm, with whole powers of two at the ends."""
    low, high = _positive(low), _positive(high)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    if first == last:
        first, last = first - 1, last + 1
    step = max(1, math.ceil((last - first) / count))
    ticks = tuple((2.0**e, spell(e)) for e in range(first, last + 1) if e % step == 0)
    return Scale(low=2.0**first, high=2.0**last, ticks=ticks, transform=math.log2)


def decades(low: float, high: float, spell: Callable[[float], str]) -> Scale:
    """Spread positive values by their logarithm, with 1, 2 and 5 times powers of ten as ticks."""
    low, high = _positive(low), _positive(high)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    step = max(1, math.ceil(len(exponents) / 6))
    values = [f * 10.0**e for e in exponents if e % step == 0 for f in factors]
    ticks = tuple((v, spell(v)) for v in values if low <= v <= high)
    return Scale(low=low, high=high, ticks=ticks, transform=math.log10)


def _positive(value: float) -> float:
    return min(max(value, 1 / _LARGEST), _LARGEST)


def tick_step(span: float, count: int) -> float:
    """The smallest 1, 2, 5 times a power of ten that cuts ``span`` into ``count`` parts at most."""
    base = 10.0 ** math.floor(math.log10(span / count))
    return next(f * base for f in (1, 2, 5, 10, 20) if span / (f * base) <= count)


def multiples(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of ``step`` from ``low`` to ``high``, as exact as decimals go."""
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, digits) for n in range(first, last + 1)]


def finite_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value, or ``None`` if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None
