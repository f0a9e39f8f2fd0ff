# SPDX-License-Identifier: BSD-3-Clause
"""Numbers and names as a reader sees them."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preamp.report import words


@given(st.text(st.characters(exclude_categories=())), st.integers(8, 40))
def test_a_shown_name_is_short_visible_and_can_be_written(name: str, limit: int) -> None:
    shown = words.shown(name, limit)
    assert len(shown) <= limit
    assert not {"Cc", "Cf", "Cs", "Zl", "Zp"} & {unicodedata.category(c) for c in shown}
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("blocks.3.weight", "blocks.3.weight"),
        ("a\nb", "a\\nb"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("משקל", "משקל"),
        ("a" * 30 + "b" * 30, "a" * 5 + "…" + "b" * 4),
    ],
)
def test_names(name: str, shown: str) -> None:
    assert words.shown(name, 60 if len(name) < 60 else 10) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 %"),
        (1e-9, "<0.1 %"),
        (0.0123, "1.2 %"),
        (0.05, "5 %"),
        (0.5, "50 %"),
        (0.99999, ">99.9 %"),
        (1.0, "100 %"),
        (math.nan, "–"),
    ],
)
def test_shares_are_0_and_100_only_for_nothing_and_all(value: float, text: str) -> None:
    assert words.share(value) == text.replace(" ", "\u00a0")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (512.0, "512"),
        (65536.0, "2¹⁶"),
        (2.0**-24, "2⁻²⁴"),
        (1000.0, "1,000"),
        (0.0, "0"),
        (math.inf, "infinite"),
        (-math.inf, "−inf"),
        (math.nan, "not a number"),
    ],
)
def test_loss_scales(value: float, text: str) -> None:
    assert words.scale(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (200 * 2**20, "200 MiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert words.size(count) == text


def test_magnitudes_and_counts() -> None:
    assert words.magnitude(-1e-5) == "−1e−05"
    assert words.magnitude(None) == "–"
    assert (words.counted(1, "step"), words.counted(2000, "step")) == ("1 step", "2,000 steps")
