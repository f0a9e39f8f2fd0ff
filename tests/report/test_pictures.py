# SPDX-License-Identifier: BSD-3-Clause
"""What is drawn lies where it should, and nothing that matters is left out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import records as made
from preamp.report import layers, memory
from preamp.report.blocks import Missing, Table
from preamp.report.chart import (
    COLUMNS,
    Chart,
    Line,
    Marks,
    column_of,
    columns_hit,
    decades,
    draw,
    linear,
    multiples,
    powers_of_two,
    running_median,
    thin,
    tick_step,
)
from preamp.report.gather import Run, gather
from preamp.report.layers import heat_map, stalled_shares
from preamp.report.svg import Html, tag

FINITE = st.floats(-1e30, 1e30)
PARTS = layers.underflow, layers.lost, layers.zeros


def test_elements_escape_what_is_not_html() -> None:
    assert tag("a", "<b>", Html("<i></i>"), href='"&', data_x=1.25) == (
        '<a href="&quot;&amp;" data-x="1.2">&lt;b&gt;<i></i></a>'
    )
    assert tag("a", title=None) == "<a></a>"


@given(FINITE, st.floats(1e-6, 1e30))
def test_a_linear_scale_keeps_order_and_ends(low: float, span: float) -> None:
    scale = linear(low, low + span, str)
    assert scale.place(scale.low) == 0
    assert scale.place(scale.high) == 1
    places = [scale.place(value) for value, _ in scale.ticks]
    assert places == sorted(places)
    assert len(places) <= 7


@pytest.mark.parametrize(
    ("span", "count", "step"), [(60, 5, 20), (100_000, 5, 20_000), (0.35, 5, 0.1), (1, 5, 0.2)]
)
def test_ticks_are_1_2_5_times_powers_of_ten(span: float, count: int, step: float) -> None:
    assert tick_step(span, count) == pytest.approx(step)


def test_ticks_are_exact_decimals() -> None:
    assert multiples(0.0, 0.5, 0.1) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert multiples(1, 60, 20) == [20, 40, 60]


def test_a_scale_of_powers_has_whole_ones_at_its_ends() -> None:
    scale = powers_of_two(3.0, 70.0, lambda e: f"2^{e}")
    assert (scale.low, scale.high) == (2.0, 128.0)
    assert scale.place(16.0) == pytest.approx(0.5)
    assert powers_of_two(8.0, 8.0, str).low == 4.0
    assert decades(1.0, 100.0, str).ticks[0] == (1.0, "1.0")


@given(st.lists(st.one_of(FINITE, st.just(math.nan), st.just(math.inf)), max_size=300))
def test_thinning_keeps_the_extremes_of_every_column(values: list[float]) -> None:
    points = list(enumerate(values))
    last = max(len(values) - 1, 1)
    kept = [point for line in thin(points, 0, last, columns=20) for point in line]
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert len(kept) <= 40
    for column in range(20):
        inside = [y for x, y in points if column_of(x, 0, last, 20) == column and math.isfinite(y)]
        found = [y for x, y in kept if column_of(x, 0, last, 20) == column]
        assert (min(found, default=None), max(found, default=None)) == (
            min(inside, default=None),
            max(inside, default=None),
        )


def test_a_line_ends_where_nothing_is_finite() -> None:
    points = [(0, 1.0), (1, math.nan), (2, 3.0)]
    assert thin(points, 0, 2) == [[(0, 1.0)], [(2, 3.0)]]
    assert thin([], 0, 1) == []


@given(st.sets(st.integers(1, 100_000), min_size=1, max_size=200))
def test_every_mark_has_a_column(steps: set[int]) -> None:
    columns = columns_hit(steps, 1, 100_000)
    assert {column_of(step, 1, 100_000) for step in steps} == set(columns)
    assert 0 <= columns[0] <= columns[-1] < COLUMNS


@given(st.lists(st.integers(-5, 5).map(float), max_size=40), st.integers(1, 7))
def test_a_running_median_is_that_of_the_values_around(values: list[float], reach: int) -> None:
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    assert running_median(values, reach) == [median_low(near) for near in around]


def test_a_running_median_shows_a_jump_where_it_is_and_a_peak_nowhere() -> None:
    assert running_median([1.0] * 9 + [7.0] * 9, 2) == [1.0] * 9 + [7.0] * 9
    assert running_median([1.0] * 9 + [1e6] + [1.0] * 60, 3) == [1.0] * 70
    assert running_median([1.0, math.inf, 3.0, 3.0], 1) == [1.0, math.inf, 3.0, 3.0]


def chart(*points: tuple[float, float], xs: tuple[float, ...] = ()) -> str:
    return draw(
        Chart(
            name="c",
            title="T",
            description="D",
            lines=[Line(points=points)],
            x=linear(0, 10, str),
            y=linear(0, 100, str),
            x_name="step",
            marks=[Marks(name="skipped", xs=xs, kind="skip")],
            height=100,
        )
    )


def test_a_path_goes_through_its_points() -> None:
    assert 'd="M0 100L500 50 1000 0"' in chart((0, 0), (5, 50), (10, 100))
    assert 'd="M500 50h0"' in chart((5, 50))


def test_marks_are_drawn_where_the_steps_are() -> None:
    assert re.search(r'd="M0\.7 0v8M999\.3 0v8"', chart((0, 0), xs=(0, 10)))
    assert "skipped" not in chart((0, 0))


def test_shades_begin_at_their_limits() -> None:
    assert [layers.shade_of(share) for share in (0, 1e-9, 0.01, 0.05, 0.2, 0.5, 1)] == list(
        (0, 1, 2, 3, 4, 5, 5)
    )


def test_underflow_is_a_share_of_what_is_not_zero() -> None:
    seen = [made.tensor(elements=100, zeros=50, below_normal=20, below_subnormal=10)]
    assert [part(seen) for part in PARTS] == [0.4, 0.2, 0.5]
    assert [part([]) for part in PARTS] == [0, 0, 0]
    assert [part([*seen, *seen]) for part in PARTS] == [0.4, 0.2, 0.5]


def test_heat_map_groups_by_module_and_keeps_the_worst_of_a_column() -> None:
    looks = [
        made.look(
            number,
            made.tensor("a.weight", below_normal=number),
            made.tensor("a.bias", below_normal=0),
            made.tensor("b.weight", below_normal=50 if number == 7 else 0),
        )
        for number in range(1, 11)
    ]
    found = heat_map(gather(looks), times=5)
    assert found is not None
    worst, other = found.layers
    assert (worst.name, worst.worst, worst.worst_step) == ("b", 0.5, 7)
    assert worst.cells == (0, 0, 0, 0.5, 0)
    assert (other.name, other.worst, other.worst_step) == ("a", 0.05, 10)
    assert other.cells == (0.01, 0.02, 0.03, 0.04, 0.05)


def test_stalled_weights_of_the_latest_look_stand_beside_their_layer() -> None:
    looks = [
        made.look(1, made.tensor("a.w"), made.tensor("a.w", what="weight", stalled=90)),
        made.look(2, made.tensor("a.w"), made.tensor("a.w", what="weight", stalled=10)),
        made.look(2, made.tensor("b.w", below_normal=1)),
    ]
    assert stalled_shares(gather(looks)) == {"a": 0.1}
    (_, table) = layers.underflow_section(gather(looks), "x").blocks
    assert isinstance(table, Table)
    assert [column.title for column in table.columns][-1] == "stalled"
    assert [row[-1] for row in table.rows] == ["–", "10\u00a0%"]


def test_memory_is_a_row_for_each_run_that_counted_it() -> None:
    runs = [
        Run(name="a", memory=made.MemoryRecord(step=1, categories={"weights": 50, "masters": 50})),
        Run(name="b", memory=made.MemoryRecord(step=1, categories={"weights": 25, "other": 0})),
        Run(name="c"),
    ]
    (table,) = memory.memory_section(runs, "m").blocks
    assert isinstance(table, Table)
    assert [column.title for column in table.columns] == ["run", "weights", "masters", "all"]
    assert table.rows == [
        ["a", "50 bytes", "50 bytes", "100 bytes"],
        ["b", "25 bytes", "0 bytes", "25 bytes"],
    ]
    (missing,) = memory.memory_section([Run()], "m").blocks
    assert isinstance(missing, Missing)


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


def test_gradients_that_are_not_finite_are_neither_zero_nor_free_of_underflow() -> None:
    bad = made.tensor("a.weight", elements=100, zeros=10, nonfinite=90)
    assert layers.zeros([bad]) == 0.1
    assert math.isnan(layers.underflow([bad]))
    fine = made.tensor("b.weight")
    found = heat_map(gather([made.look(1, bad, fine), made.look(2, bad, fine)]))
    assert found is not None
    other, layer = found.layers
    assert (other.name, layer.name) == ("b", "a")
    assert all(map(math.isnan, layer.cells))
    (_, table) = layers.underflow_section(gather([made.look(1, bad, fine)]), "x").blocks
    assert isinstance(table, Table)
    assert table.rows[1][1:] == ["–", "1", "–", "–", "10\u00a0%", "16.0"]
    assert "no gradient was finite" in layers.strip(layer, found, "x")
    found = heat_map(gather([made.look(1, bad), made.look(2, replace(bad, nonfinite=0))]))
    assert found is not None
    (layer,) = found.layers
    assert (math.isnan(layer.cells[0]), layer.cells[1], layer.worst) == (True, 0.0, 0.0)
