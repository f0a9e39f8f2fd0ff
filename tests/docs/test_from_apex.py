# SPDX-License-Identifier: BSD-3-Clause
"""The page of what works of Apex is in order, and each of its rows is shown by a marked test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "from-apex.md").read_text(encoding="utf-8")
CELL = r" ((?:[^|\\]|\\.)*?) *\|"


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """Name → verdict and difference; it is called by its section and itself: ``"5.3 step"``.

    Names that share a row are separated by points in the middle of the line.
    """
    rows: dict[str, tuple[str, str]] = {}
    section = ""
    for line in page.splitlines():
        if heading := re.match(r"## ([\w.]+)\. ", line):
            section = heading[1]
        elif (cells := re.fullmatch(rf"\|{CELL * 3}", line)) and cells[2] != "here":
            for cell in cells[1].split(" · "):
                name = f"{section} {cell}".replace("`", "").replace("\\|", "|")
                assert name not in rows
                rows[name] = (cells[2], cells[3])
    return rows


ROWS = rows_of(PAGE)


def named(mark: str, rows: dict[str, tuple[str, str]]) -> set[str]:
    """Rows that a mark names: the one of this name, or all whose names begin with these words."""
    if mark in rows:
        return {mark}
    return {row for row in rows if re.match(rf"{re.escape(mark)}(?![\w-]|\.\d)", row)}


def marks_in(source: str) -> dict[str, set[str]]:
    """Test → what it is marked with."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        name, marks = "", []
        if isinstance(node, ast.FunctionDef):
            name, marks = node.name, node.decorator_list
        elif isinstance(node, ast.Assign):  # the TestCase of a hypothesis state machine
            name, marks = ast.unparse(node.targets[0]), list(ast.walk(node.value))
        for call in marks:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.apex":
                found.setdefault(name, set()).update(map(ast.literal_eval, call.args))
    return found


@pytest.fixture(scope="module")
def marks() -> dict[Path, dict[str, set[str]]]:
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    return {path: marks_in(text) for path, text in texts.items() if "@pytest.mark.apex(" in text}


def test_every_row_has_a_test_and_every_mark_a_row(marks: dict[Path, dict[str, set[str]]]) -> None:
    rows = dict.fromkeys(ROWS, False)
    for file in marks.values():
        for given in file.values():
            for mark in given:
                shown = named(mark, ROWS)
                assert shown, f"{mark!r} is no row of docs/from-apex.md"
                rows.update(dict.fromkeys(shown, True))
    assert [row for row, is_shown in rows.items() if not is_shown] == []


def test_what_is_marked_runs(marks: dict[Path, dict[str, set[str]]]) -> None:
    for path, tests in marks.items():
        if not path.stem.startswith("test_"):  # a test beside it runs these on two ranks
            runners = [file.read_text("utf-8") for file in path.parent.glob("test_*.py")]
            assert any(f"checks_of({path.stem})" in text for text in runners), path
            assert all(name.startswith("check_") for name in tests), path
        else:
            assert all(name.startswith(("test_", "Test")) for name in tests), path


def test_what_differs_says_why() -> None:
    assert [row for row, (verdict, why) in ROWS.items() if verdict != "supported" and not why] == []
    assert [row for row, (_, why) in ROWS.items() if why and not why.endswith(".")] == []


def test_rows_are_counted() -> None:
    counts = Counter(verdict for verdict, _ in ROWS.values())
    told = ", ".join(f"{counts.pop(kind)} {kind}" for kind in ("supported", "differs", "refused"))
    assert f"\n{len(ROWS)} names: {told}.\n" in PAGE
    assert not counts


@pytest.mark.parametrize(
    ("prefix", "numbers"), [("10 A-", range(1, 41)), ("B ", range(1, 20))], ids=["bugs", "forms"]
)
def test_every_number_has_a_row(prefix: str, numbers: range) -> None:
    assert all(named(f"{prefix}{number}", ROWS) for number in numbers)


@pytest.mark.parametrize(
    ("mark", "rows"),
    [
        ("5.3 step", {"5.3 step"}),
        ("5.3 step(closure", {"5.3 step(closure)"}),
        ("5", set()),
        ("6", {"6 step"}),
        ("10 A-2", {"10 A-2: lost"}),
    ],
)
def test_marks_name_rows(mark: str, rows: set[str]) -> None:
    known = ("5.3 step", "5.3 step(closure)", "6 step", "10 A-2: lost", "10 A-25: state")
    assert named(mark, dict.fromkeys(known, ("supported", ""))) == rows


def test_marks_are_found() -> None:
    source = "@pytest.mark.apex('a', 'b')\ndef test(): ...\nT = pytest.mark.apex('c')(M.TestCase)"
    assert marks_in(source) == {"test": {"a", "b"}, "T": {"c"}}
