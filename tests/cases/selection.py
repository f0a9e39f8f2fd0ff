# SPDX-License-Identifier: BSD-3-Clause
"""Which tests the quick suite runs: every value, or pair of values, but not every combination."""

import heapq
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest

SUITE = "PREAMP_TEST_SUITE"
"""The environment variable that says in child processes which suite runs."""

SUITES = ("quick", "rest", "all")
"""``rest`` is what ``quick`` leaves out, and the tests that try more there."""


def select(items: Sequence[pytest.Item], suite: str) -> list[pytest.Item]:
    """Return the tests of a suite, in the order of ``items``.

    The quick one leaves out what is marked ``full``, and of a function with three parameters or
    more the cases whose pairs of values all occur in others; of one with two, or that is marked
    ``each``, those whose values do, unless it is marked ``product``. Of a function that is marked
    ``threes`` all suites leave out the cases whose every three values occur together in others.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("full"):
            functions[item.nodeid.partition("[")[0]].append(item)
    quick = {
        cases[number]
        for cases in functions.values()
        for number in covering([values_of(item) for item in cases], _size_in_quick(cases[0]))
    }
    if suite == "quick":
        return [item for item in items if item in quick]
    spare = set[pytest.Item]()
    for cases in functions.values():
        for name, size in (("pairs", 2), ("threes", 3)):
            if cases[0].get_closest_marker(name):
                chosen = {cases[number] for number in covering(list(map(values_of, cases)), size)}
                spare.update(set(cases) - chosen - quick)
    if suite == "all":
        return [item for item in items if item not in spare]
    elsewhere = spare | quick
    return [item for item in items if item not in elsewhere or is_search(item)]


def _size_in_quick(item: pytest.Item) -> int:
    """How many values have to occur together in the quick suite."""
    has_two = len(values_of(item)) == 2 and not item.get_closest_marker("product")
    return 1 if has_two or item.get_closest_marker("each") else 2


def examples(count: int, quick: int | None = None) -> int:
    """How many examples to try in this run where the full suite tries ``count``.

    The quick suite tries a fourth of them, but 10 at least, or as many as ``quick`` says.
    """
    if quick is not None and hypothesis.settings().max_examples < 100:
        return quick
    return max(min(count, 10), count * hypothesis.settings().max_examples // 100)


def combinations(*axes: Iterable[Any], size: int = 1) -> list[tuple[Any, ...]]:
    """Combinations in which every ``size`` values occur together; ``size + 1`` in the full suite.

    For loops within a test that is marked ``more``; in its ranks too, which inherit the
    environment.
    """
    lists = list(map(list, axes))
    rows = list(itertools.product(*lists))
    places = list(itertools.product(*(range(len(values)) for values in lists)))
    is_quick = os.environ.get(SUITE) == "quick"
    return [rows[number] for number in sorted(covering(places, size if is_quick else size + 1))]


def is_search(item: pytest.Item) -> bool:
    """Whether ``item`` tries more in the full suite than in the quick one."""
    is_marked = item.get_closest_marker("more") is not None
    return is_marked or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def values_of(item: pytest.Item) -> tuple[object, ...]:
    """What each parameter of ``item`` is here; names that one mark binds are one parameter."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return ()
    params = dict(spec.params)
    values: list[object] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = names.split(",") if isinstance(names, str) else names
        values.append(tuple(id(params.pop(name.strip(), None)) for name in names))
    return (*values, *(id(params[name]) for name in sorted(params)))


def covering(rows: Sequence[tuple[object, ...]], size: int) -> list[int]:
    """Choose rows in which every ``size`` values occur that occur together; their numbers.

    Always the same for equal rows. Rows of at most ``size`` values are all chosen.
    """
    if not rows or len(rows[0]) <= size:
        return list(range(len(rows)))
    order = _diagonally(rows) if size == 1 else range(len(rows))
    bits: dict[object, int] = {}
    masks = [0] * len(rows)
    for place, number in enumerate(order):
        for values in itertools.combinations(enumerate(rows[number]), size):
            masks[place] |= bits.setdefault(values, 1 << len(bits))
    missing = (1 << len(bits)) - 1
    chosen: list[int] = []
    # How much that is missing a row has, as of when it was last looked at: that only shrinks, so a
    # first row that still has as much has the most.
    waiting = [(-mask.bit_count(), place) for place, mask in enumerate(masks)]
    heapq.heapify(waiting)
    while missing:
        before, place = waiting[0]
        count = -(masks[place] & missing).bit_count()
        if count == before:
            heapq.heappop(waiting)
            chosen.append(order[place])
            missing &= ~masks[place]
        else:
            heapq.heapreplace(waiting, (count, place))
    return chosen


def _diagonally(rows: Sequence[tuple[object, ...]]) -> list[int]:
    """Numbers of rows, first those in which all parameters go on from row to row.

    If each value is to occur once, values of the shorter lists are as frequent as each other then,
    and of two equal lists no value meets itself.
    """
    columns = map(dict.fromkeys, zip(*rows, strict=True))
    axes = [{value: place for place, value in enumerate(column)} for column in columns]
    longest = max(range(len(axes)), key=lambda number: len(axes[number]))

    def distance(number: int) -> tuple[int, ...]:
        places = [axis[value] for axis, value in zip(axes, rows[number], strict=True)]
        return tuple(
            (places[longest] - place - 1) % len(axis)
            for other, (axis, place) in enumerate(zip(axes, places, strict=True))
            if other != longest
        )

    return sorted(range(len(rows)), key=distance)
