# SPDX-License-Identifier: BSD-3-Clause
"""A part of the generated overflows whose cause is known; ``make bench`` has all of them."""

from __future__ import annotations

import itertools

import pytest

from insight import attribution
from insight.score import Score


def check(every: int, offset: int) -> None:
    scores = attribution.scores(every, offset)
    assert [wrong for score in scores for wrong in score.wrong] == []
    cases = sum(score.cases for score in scores)
    assert cases > 20
    assert sum(score.right for score in scores) >= 0.95 * cases  # the others are not known


@pytest.mark.filterwarnings("ignore")
def test_a_few() -> None:
    check(1201, 11)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("offset", range(2))
def test_more(offset: int) -> None:
    check(149, offset)


def test_a_wrong_answer_counts() -> None:
    parameter, module = Score("parameter"), Score("module")
    case = next(iter(attribution.cases()))
    attribution.FAULTS["lie"] = attribution.FAULTS[case.fault][0], attribution.Truth("1", "data")
    try:
        lie = attribution.Case(case.architecture, "lie", case.level, case.way)
        attribution.judge(lie, parameter, module)
    finally:
        del attribution.FAULTS["lie"]
    assert (parameter.right, len(module.wrong)) == (1, 1)


def test_there_are_at_least_a_thousand() -> None:
    assert sum(1 for _ in itertools.islice(attribution.cases(), 1000)) == 1000
