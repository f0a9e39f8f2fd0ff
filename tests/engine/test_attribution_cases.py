# SPDX-License-Identifier: BSD-3-Clause
"""A part of the generated overflows whose cause is known; ``make bench`` has all of them."""

import itertools
from collections.abc import Iterator

import pytest

import attribution
from attribution import Score


def chosen() -> Iterator[attribution.Case]:
    """Each fault at each level it can be at; architectures and ways to train take turns."""
    possible = set(attribution.cases())
    pairs = itertools.product(attribution.FAULTS, attribution.LEVELS)
    kinds, ways = list(attribution.ARCHITECTURES), attribution.WAYS
    for number, (fault, level) in enumerate(pairs):
        turns = range(5 * number, 5 * number + len(ways))
        tried = (
            attribution.Case(kinds[turn % len(kinds)], fault, level, ways[turn % len(ways)])
            for turn in turns
        )
        yield from itertools.islice((case for case in tried if case in possible), 1)


def check(cases: list[attribution.Case], every_order: int) -> None:
    """Each case is answered, and rightly: the first parameter, the module, and the order."""
    parameter, module, order = Score("parameter"), Score("module"), Score("order")
    for case in cases:
        attribution.judge(case, parameter, module)
    orders = list(itertools.islice(attribution.order_cases(), 0, None, every_order))
    for one in orders:
        attribution.judge_order(*one, order)
    assert [wrong for score in (parameter, module, order) for wrong in score.wrong] == []
    assert (parameter.unknown, module.unknown, order.unknown) == (0, 0, 0)
    assert {case.fault for case in cases} == set(attribution.FAULTS)
    assert {case.architecture for case in cases} == set(attribution.ARCHITECTURES)
    assert {case.level for case in cases} == set(attribution.LEVELS)
    assert {case.way for case in cases} == set(attribution.WAYS)
    assert {program for program, _, _ in orders} == set(attribution.PROGRAMS)


@pytest.mark.filterwarnings("ignore")
def test_each_fault() -> None:
    """At one level; each architecture, level and way is among them."""
    by_fault = [list(some) for _, some in itertools.groupby(chosen(), lambda case: case.fault)]
    check([some[number % len(some)] for number, some in enumerate(by_fault)], 67)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_each_fault_at_each_level() -> None:
    check(list(chosen()), 13)


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
