# SPDX-License-Identifier: BSD-3-Clause
"""Tests take opt levels from one list, so that a new level meets them all, and words from books."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cases.levels import LEVEL_NAMES

TESTS = Path(__file__).parents[1]
LISTS = (ast.List, ast.Tuple, ast.Set)


def levels_in(nodes: Sequence[ast.expr | None]) -> set[str]:
    found = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {str(value) for value in found if value in LEVEL_NAMES}


def violations(source: str) -> Iterator[str]:
    """Lists of all levels, and tables that have a row for most levels but not for all."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, LISTS) and levels_in(node.elts) == set(LEVEL_NAMES):
            yield f"line {node.lineno}: a list of all levels"
        elif isinstance(node, ast.Dict):
            missing = set(LEVEL_NAMES) - levels_in(node.keys)
            if len(missing) < len(LEVEL_NAMES) / 2 and missing:
                yield f"line {node.lineno}: no row for {', '.join(sorted(missing))}"


def test_levels_are_listed_once() -> None:
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {name: list(violations(path.read_text("utf-8"))) for name, path in files.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("template", "levels", "expected"),
    [
        ("x = {}", LEVEL_NAMES, "line 1: a list of all levels"),
        ("x = [(level, 1) for level in {}]", LEVEL_NAMES[::-1], "line 1: a list of all levels"),
        ("x = dict.fromkeys({}, 1)", LEVEL_NAMES[1:], None),
        ("x = {}", dict.fromkeys(LEVEL_NAMES, 1), None),
        ("x = {}", dict.fromkeys(LEVEL_NAMES[:-1], 1), f"line 1: no row for {LEVEL_NAMES[-1]}"),
        ("x = {}", dict.fromkeys(LEVEL_NAMES[:2], 1), None),
    ],
)
def test_planted_lists_are_found(template: str, levels: object, expected: str | None) -> None:
    assert list(violations(template.format(levels))) == [expected] * (expected is not None)


# -- books of approved words: in order, and nothing in them that no test asks for ------------------


BOOKS = sorted((TESTS / "approved").glob("*.txt"))


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_book_has_each_name_once_and_some_test_names_it(book: Path) -> None:
    names = [line.split(" | ", 1)[0] for line in book.read_text("utf-8").splitlines()]
    assert names == list(dict.fromkeys(names))
    sources = [path.read_text("utf-8") for path in TESTS.rglob("*.py")]
    asking = "\n".join(source for source in sources if f'"{book.stem}"' in source)
    assert [name for name in names if f'"{name}"' not in asking] == []
