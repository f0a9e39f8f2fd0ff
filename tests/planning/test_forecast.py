# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of ranges against real casts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preamp.numerics import FORMATS, count_exponents
from preamp.numerics.records import What
from preamp.planning.forecast import LARGEST_SCALE, MARGIN, Range, forecast, starting_scale
from preamp.planning.ranges import Recorder

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

MAGNITUDES = st.floats(
    min_value=float(np.float32(1e-45)), max_value=float(np.float32(3e38)), width=32
)
VALUES = st.lists(MAGNITUDES | MAGNITUDES.map(lambda x: -x) | st.just(0.0), min_size=1, max_size=40)
SCALES = st.integers(0, 24).map(lambda k: 2.0**k)
FORMS = st.sampled_from(sorted(HALVES))


def range_of(values: list[float], what: What = "gradient") -> Range:
    tensor = torch.tensor(values, dtype=torch.float32)
    counts = tuple(int(count) for count in count_exponents(tensor))
    return Range("w", what, counts, float(tensor.abs().max()))


@given(VALUES, FORMS, SCALES)
def test_forecasts_equal_counting_scaled_values(
    values: list[float], name: str, scale: float
) -> None:
    form = FORMATS[name]
    found = forecast(range_of(values), form, scale)
    exact = [abs(value) * scale for value in values if value]  # exact in float64
    assert found.elements == len(values)
    assert found.nonzero == len(exact)
    assert found.lost == sum(value < form.smallest_subnormal for value in exact)
    assert found.lost_unscaled == sum(0 < abs(v) < form.smallest_subnormal for v in values)


@given(VALUES, FORMS, SCALES)
def test_what_is_not_lost_survives_the_cast(values: list[float], name: str, scale: float) -> None:
    found = forecast(range_of(values), FORMATS[name], scale)
    # float64 reaches half through float32, where products of these may underflow or overflow.
    scaled = torch.tensor(values, dtype=torch.float64) * scale
    half = scaled.clamp(-3e38, 3e38).float().to(HALVES[name])
    vanished = int(((half == 0) & (scaled != 0)).sum())
    assert vanished <= found.lost
    if not found.overflows:
        assert bool(torch.isfinite(half).all())


@given(VALUES, FORMS, SCALES)
def test_only_gradients_carry_the_scale(values: list[float], name: str, scale: float) -> None:
    form = FORMATS[name]
    one = forecast(range_of(values, "activation"), form, 1.0)
    assert forecast(range_of(values, "activation"), form, scale) == one


@given(MAGNITUDES, FORMS, st.integers(0, 8))
def test_the_starting_scale_uses_the_room_and_leaves_the_margin(
    largest: float, name: str, margin: int
) -> None:
    form = FORMATS[name]
    scale = starting_scale(largest, form, margin=margin)
    assert math.frexp(scale)[0] == 0.5
    assert 1.0 <= scale <= LARGEST_SCALE
    needed = math.ldexp(largest, margin)
    if scale > 1:
        assert needed * scale <= form.largest
    if scale < LARGEST_SCALE:
        assert needed * scale * 2 > form.largest


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0.0, 2.0**24),
        (2.0**-100, 2.0**24),
        (1.0, 2.0 ** (15 - MARGIN)),
        (65504.0, 1.0),
        (65504.0 / 2**MARGIN, 1.0),
        (65504.0 / 2 ** (MARGIN + 1), 2.0),
        (np.nextafter(np.float32(65504.0 / 2 ** (MARGIN + 1)), np.float32(1e9)), 1.0),
        (1e9, 1.0),
    ],
)
def test_starting_scales_at_the_edges(largest: float, expected: float) -> None:
    assert starting_scale(float(largest), FORMATS["float16"]) == expected


def test_a_scale_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="not a power of two"):
        forecast(range_of([1.0]), FORMATS["float16"], 3.0)


def test_recording_adds_steps_up() -> None:
    recorder = Recorder()
    recorder.add("w", "gradient", torch.tensor([0.5, 0.0, -3.0]))
    recorder.add("w", "gradient", torch.tensor([2.0**-30, math.inf, math.nan]))
    (found,) = recorder.read()
    assert (found.elements, found.nonzero, found.max_abs) == (6, 3, 3.0)
    assert found.below(-24) == 1


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=20),
    st.lists(st.floats(-1, 1, width=32), min_size=20, max_size=20),
    FORMS,
)
def test_stalls_are_updates_that_leave_the_half_weight(
    weights: list[float], updates: list[float], name: str
) -> None:
    before = torch.tensor(weights)
    after = before + torch.tensor(updates[: len(weights)])
    recorder = Recorder()
    recorder.add_update("w", before, after)
    (found,) = recorder.read()
    half = before.to(HALVES[name])
    moved = after - before
    stepped = (half.double() + moved.double()).float().to(HALVES[name])
    expected = int(((stepped == half) & (moved != 0)).sum())
    assert dict(found.stalled)[name] == expected
    shown = forecast(found, FORMATS[name], 1.0)
    assert shown.stalled == expected
