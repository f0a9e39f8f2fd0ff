# SPDX-License-Identifier: BSD-3-Clause
"""What is drawn, counted and worded is what was recorded, and nothing that matters is left out."""

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import records as made
from preamp.report import words
from preamp.report.blocks import Figure
from preamp.report.drawing import COLUMNS, exponents_picture, scale_picture, thin
from preamp.report.gather import gather
from preamp.report.html import Html, tag
from preamp.report.layers import layers_section
from report.pages import Outline


def test_elements_escape_what_is_not_html() -> None:
    assert tag("a", "<b>", Html("<i></i>"), href='"&', data_x="1") == (
        '<a href="&quot;&amp;" data-x="1">&lt;b&gt;<i></i></a>'
    )


@given(st.lists(st.floats(-1e30, 1e30), max_size=3000))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values, 5))
    kept = thin(points)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert len(kept) <= 2 * COLUMNS
    for extreme in (min, max):
        assert extreme((y for _, y in kept), default=0) == extreme(values, default=0)


def test_a_scale_is_drawn_with_a_mark_for_each_skip() -> None:
    steps = [
        made.step(n, skipped=n % 9 == 0, scales={0: 2.0 ** (16 - n // 9), 1: 8.0})
        for n in range(1, 100)
    ]
    drawn = scale_picture(gather(steps), "x")
    assert drawn == scale_picture(gather(steps), "x")
    assert drawn.count("<use ") - scale_picture(gather(steps[:1]), "x").count("<use ") == 11
    assert "starts at 2¹⁶, ends at 32, and lies between 32 and 2¹⁶. The loss scale of" in drawn
    assert "Skipped: steps 9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99." in drawn
    assert {*re.findall(r'(?: id="|href="#|url\(#)(x-)?', drawn)} == {"x-"}
    assert "#0102" not in drawn
    assert {"var(--line)", "var(--warning)"} <= {*re.findall(r"var\(--\w+\)", drawn)}
    assert "loss 1" in Outline(drawn).words


def test_skips_of_optimizers_that_step_in_turn_are_marked_by_step() -> None:
    numbers = ((0, 800), (1, 1), (0, 900), (1, 400))
    steps = [made.step(n, skipped=True, scales={0: 2.0**n}, optimizer=o) for o, n in numbers]
    assert [x for x, _ in thin([(step.step, 1.0) for step in steps])] == [1, 400, 800, 900]


def test_many_skips_are_a_mark_for_each_column() -> None:
    records = [made.step(n, skipped=True, scales={0: 2.0**16 / n}) for n in range(1, 5001)]
    drawn = scale_picture(gather(records), "x")
    assert 0.9 * COLUMNS < drawn.count("<use ") < COLUMNS + 20
    assert "5,000 steps were skipped, from 1 to 5,000." in drawn


@pytest.mark.parametrize("histogram", [{-30: 5, 3: 2}, {200: 1}, {}])
def test_exponents_are_drawn_beside_what_the_format_holds(histogram: dict[int, int]) -> None:
    drawn = exponents_picture(made.tensor(histogram=histogram), "x")
    assert "float16 holds 2⁻²⁴ to 2¹⁶." in drawn
    assert len(re.findall(r"fill: var\(--line\)", drawn)) == len(histogram)


def test_the_gradients_that_overflowed_are_drawn_as_they_were_before() -> None:
    looks = [
        made.look(n, made.tensor("a.w", histogram={n: 1}, nonfinite=n == 3), made.tensor("b.w"))
        for n in (1, 3, 5)
    ]
    overflows = [made.overflow(n, name) for n, name in ((3, "a.w"), (4, "a.w"), (4, "b.w"))]
    steps = [made.step(n, skipped=n in (3, 4)) for n in range(1, 6)]
    blocks = layers_section(gather([made.start(), *steps, *looks, *overflows]), "x").blocks
    (figure,) = (block for block in blocks if isinstance(block, Figure))
    assert figure.title == "Gradient of a.w"  # there is no histogram of the other
    assert "first in 2 steps. These are its values at step 3" in figure.caption
    assert "1 value infinite or nan are not drawn" in figure.caption


def test_each_optimizer_counts_its_own_steps() -> None:
    """A critic that steps five times as often: every record tells the scales of all losses."""
    critic = [made.step(n, 9.0, scales={0: 2.0 ** -(n // 5), 1: 1.0}) for n in range(1, 11)]
    other = [
        made.step(n, losses={1: 5.0}, scales={0: 2.0**-n, 1: 4.0}, optimizer=1) for n in (1, 2)
    ]
    run = gather([*critic[:5], other[0], *critic[5:], other[1]])
    assert run.scales() == {
        "0": [(n, 2.0 ** -(n // 5)) for n in range(1, 11)],
        "1": [(1, 4.0), (2, 4.0)],
    }
    assert run.losses() == {"0": [(n, 9.0) for n in range(1, 11)], "1": [(1, 5.0), (2, 5.0)]}


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_optimizers_of_one_loss_share_its_line(loss: float) -> None:
    steps = [made.step(n, loss, optimizer=o) for n in (1, 2) for o in (0, 1)]
    assert [(name, len(row)) for name, row in gather(steps).losses().items()] == [("0", 2)]


def test_losses_under_one_id_are_told_apart_by_optimizer() -> None:
    steps = [made.step(n, 1.0 + o, optimizer=o) for n in (1, 2) for o in (0, 1)]
    assert gather(steps).losses() == {
        "0 of optimizer 0": [(1, 1.0), (2, 1.0)],
        "0 of optimizer 1": [(1, 2.0), (2, 2.0)],
    }


# -- numbers and names ------------------------------------------------------------------------


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


# fmt: off
WORDS: dict[Callable[[Any], str], tuple[tuple[Any, str], ...]] = {
    words.share: (  # 0 and 100 only for nothing and all
        (0.0, "0 %"), (1e-9, "<0.1 %"), (0.0123, "1.2 %"), (0.05, "5 %"), (0.5, "50 %"),
        (0.99999, ">99.9 %"), (1.0, "100 %"), (math.nan, "–"),
    ),
    words.scale: (
        (1.0, "1"), (512.0, "512"), (65536.0, "2¹⁶"), (2.0**-24, "2⁻²⁴"), (1000.0, "1,000"),
        (0.0, "0"), (math.inf, "infinite"), (-math.inf, "−inf"), (math.nan, "not a number"),
    ),
    words.size: (
        (0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (200 * 2**20, "200 MiB"),
    ),
    words.magnitude: ((-1e-5, "−1e−05"), (None, "–")),
}
# fmt: on


@pytest.mark.parametrize("function", WORDS, ids=lambda function: function.__name__)
def test_numbers_in_words(function: Callable[[Any], str]) -> None:
    for value, text in WORDS[function]:
        assert function(value).replace("\u00a0", " ") == text
    assert (words.counted(1, "step"), words.counted(2000, "step")) == ("1 step", "2,000 steps")
