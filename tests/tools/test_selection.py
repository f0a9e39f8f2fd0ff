# SPDX-License-Identifier: BSD-3-Clause
"""The quick suite has every pair of values; quick and rest together are everything."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import SUITE, combinations, covering, examples, select


@pytest.mark.parametrize("together", [2, 3])
@pytest.mark.parametrize("sizes", [(5, 4, 3), (8, 6, 6, 4), (2, 2, 2, 2, 2, 7), (3, 1, 1)])
def test_every_pair_is_chosen_or_every_three(sizes: tuple[int, ...], together: int) -> None:
    rows = [row for row in itertools.product(*map(range, sizes)) if sum(row) % 5 != 1]

    def sets_of(some: list[tuple[int, ...]]) -> set[object]:
        return {few for row in some for few in itertools.combinations(enumerate(row), together)}

    chosen = [rows[number] for number in covering(rows, together)]
    assert sets_of(chosen) == sets_of(rows)
    assert len(set(chosen)) == len(chosen) <= len(rows)
    assert len(sizes) < 4 or together == 3 or 3 * len(chosen) < len(rows)


def test_the_suites_share_searches_only(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path == request.path]
    quick, rest = select(items, "quick"), select(items, "rest")
    assert {*quick, *rest} == set(select(items, "all")) == set(items)  # without what is spare
    assert {item.name for item in {*quick} & {*rest}} <= {"test_a_search"}
    assert request.node in (*quick, *rest)
    assert all(item.get_closest_marker("full") is None for item in quick)


@pytest.mark.pairs
@pytest.mark.parametrize("c", "xyz")
@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("a", [True, False])
def test_of_some_every_two_values_are_enough(
    request: pytest.FixtureRequest, a: bool, b: int, c: str
) -> None:
    """In the full suite too: nine of these eighteen. The quick suite has all that there are."""
    assert request.config.getoption("--suite") != "rest"
    name = test_of_some_every_two_values_are_enough.__name__
    assert sum(item.name.startswith(f"{name}[") for item in request.session.items) <= 9


@given(st.integers())
def test_a_search(number: int) -> None:
    assert number is not None


def test_loops_are_short_in_the_quick_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = ("abc", (1, 2), [True, False])
    monkeypatch.setenv(SUITE, "quick")
    few, pairs = combinations(*axes), combinations(*axes, size=2)
    assert (len(few), len(pairs)) == (3, 6)
    assert [set(values) for values in zip(*few, strict=True)] == [set("abc"), {1, 2}, {True, False}]
    for suite in ("rest", "all"):
        monkeypatch.setenv(SUITE, suite)
        assert combinations(*axes) == pairs
        assert combinations(*axes, size=2) == list(itertools.product(*axes))
    monkeypatch.delenv(SUITE)
    assert combinations(*axes) == pairs


def test_searches_are_as_long_as_the_profile_says() -> None:
    most = settings().max_examples
    assert [examples(100), examples(200), examples(8)] == [most, 2 * most, max(8, most * 8 // 100)]
    assert examples(200, quick=7) == (7 if most == 25 else 2 * most)
