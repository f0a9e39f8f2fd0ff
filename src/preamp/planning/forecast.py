# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of observed values in a narrower format: arithmetic on exponent counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from preamp.numerics import NumberFormat
from preamp.numerics.records import What
from preamp.numerics.statistics import BELOW, below

MARGIN = 3
"""Powers of two that the recommended loss scale leaves free above the largest gradient seen."""

LARGEST_SCALE = 2.0**24
"""Where a dynamic scale stops growing by default; none is recommended above it."""


@dataclass(frozen=True, slots=True)
class Range:
    """The magnitudes that one tensor had over all recorded steps."""

    # Qualified name of the parameter or buffer; of a module with ``" output"``; or of a module with
    # the operation in it, such as ``"attention: bmm"``.
    name: str
    what: What  # ``"gradient"``, ``"weight"`` (buffers too), ``"update"``, ``"activation"``
    counts: tuple[int, ...]  # elements by exponent, as of `preamp.numerics.count_exponents`
    max_abs: float  # largest finite magnitude
    # Of gradients, the elements that do something, by exponent: of a parameter, those whose update
    # is at least a tenth of the root mean square; of an output, those that are so themselves.
    acting: tuple[int, ...] = ()
    # Of updates: by half format, elements that would not have changed a half weight.
    stalled: tuple[tuple[str, int], ...] = ()

    @property
    def elements(self) -> int:
        """Elements over all steps."""
        return sum(self.counts)

    @property
    def nonzero(self) -> int:
        """Those of them that are finite and not zero."""
        return sum(self.counts[BELOW:])

    def below(self, exponent: int) -> int:
        """How many are not zero and less than ``2 ** exponent`` in magnitude."""
        return below(self.counts, exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForecast:
    """One tensor in a level's half format.

    Attributes:
        name: See `Range`.
        what: See `Range`.
        elements: Over all recorded steps; the counts below are of these.
        nonzero: Finite and not zero.
        max_abs: Largest magnitude seen in float32, without a loss scale.
        headroom: Powers of two between it, with the loss scale on where it is a gradient, and
            the largest value of the format; negative: it overflows. ``None`` for zeros.
        lost: Not zero, and below the smallest positive value of the format with the scale on.
        lost_unscaled: The same without a loss scale.
        acting: Of a gradient: elements that do something. Those of a parameter have an update, as
            its optimizer makes it, of at least a tenth of the tensor's root mean square.
        acting_lost: Those of them that are lost.
        stalled: Of updates that no master takes: elements that leave a half weight as it was.
    """

    name: str
    what: What
    elements: int
    nonzero: int
    max_abs: float
    headroom: float | None
    lost: int
    lost_unscaled: int
    acting: int = 0
    acting_lost: int = 0
    stalled: int | None = None

    @property
    def overflows(self) -> bool:
        """Whether the largest value seen has no finite neighbour in the format."""
        return self.headroom is not None and self.headroom < 0

    @property
    def lost_share(self) -> float:
        """``acting_lost`` as a share of ``acting``."""
        return self.acting_lost / self.acting if self.acting else 0.0


def forecast(values: Range, form: NumberFormat, scale: float) -> TensorForecast:
    """Put values seen in float32 into ``form``; ``scale``, a power of two, is on gradients only."""
    shift = _exponent_of(scale) if values.what == "gradient" else 0
    stalled = dict(values.stalled).get(form.name)
    return TensorForecast(
        name=values.name,
        what=values.what,
        elements=values.elements,
        nonzero=values.nonzero,
        max_abs=values.max_abs,
        headroom=form.headroom(math.ldexp(values.max_abs, shift)),
        lost=values.below(form.subnormal_exponent - shift),
        lost_unscaled=values.below(form.subnormal_exponent),
        acting=sum(values.acting[BELOW:]),
        acting_lost=below(values.acting, form.subnormal_exponent - shift) if values.acting else 0,
        stalled=stalled if values.what == "update" else None,
    )


def starting_scale(max_abs: float, form: NumberFormat, *, margin: int = MARGIN) -> float:
    """The largest power of two that leaves gradients ``margin`` powers of two of room.

    From 1, the neutral scale, to `LARGEST_SCALE`, which it is where the finite ``max_abs`` of all
    gradients is zero.
    """
    if max_abs <= 0:
        return LARGEST_SCALE
    exponent = form.max_exponent + 1 - math.frexp(max_abs)[1]
    if math.ldexp(max_abs, exponent) > form.largest:
        exponent -= 1
    exponent = min(max(exponent - margin, 0), _exponent_of(LARGEST_SCALE))
    return math.ldexp(1.0, exponent)


def _exponent_of(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(f"{scale} is not a power of two")
    return exponent - 1
