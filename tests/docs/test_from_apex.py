# SPDX-License-Identifier: BSD-3-Clause
"""The page of what works of Apex is in order, and each of its rows names tests that show it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "from-apex.md").read_text(encoding="utf-8")
SOURCES = {
    path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8")
    for path in TESTS.rglob("*.py")
}
CELL = r" ((?:[^|\\]|\\.)*?) *\|"

UNWRITTEN = {
    "4.1 register_": "`register_…` stands for four functions; tests name them",
    "4.1 wraps": "the test looks at `__wrapped__` and the names that wraps sets",
    "4.2 BANNED_FUNCS": "the test takes every name of RULES",
    "4.2 BFLOAT16_FUNCS": "the test takes every name of RULES",
    "6 _update_scale": "step calls it, and the tests step",
    "9.5 multiproc": "the test takes every name of REFUSED",
    "9.7 MLP": "the test takes every name of REFUSED",
    "10 OptimWrapper": "what wrap_optimizer gave, by which the test asks for it",
}
"""Section and word → why no test of its row has it as text."""


class Row(NamedTuple):
    """One line of a table."""

    section: str
    names: list[str]  # with their section: "5.3 `step`"
    verdict: str
    difference: str
    shown_by: list[tuple[str, str]]  # file, test

    def words(self) -> set[str]:
        """The last part of all that is code in its names: ``flatten`` of ``apex_C.flatten``."""
        code = [found for name in self.names for found in re.findall(r"`([^`]+)`", name)]
        return {re.split(r"[^\w.]", found)[0].split(".")[-1] or found for found in code}


def rows_of(page: str) -> list[Row]:
    """Names that share a row are separated by points in the middle of the line, as tests are."""
    rows, section = [], ""
    for line in page.splitlines():
        if heading := re.match(r"## ([\w.]+)\. ", line):
            section = heading[1]
        elif (cells := re.fullmatch(rf"\|{CELL * 4}", line)) and cells[2] != "here":
            shown = [one.strip("`").partition("::") for one in cells[4].split(" · ")]
            tests = [(file, test) for file, _, names in shown for test in names.split(", ")]
            names = [f"{section} {name}" for name in cells[1].split(" · ")]
            rows.append(Row(section, names, cells[2], cells[3], tests))
    return rows


ROWS = rows_of(PAGE)
NAMES = [name for row in ROWS for name in row.names]


def run_of(file: str, sources: Mapping[str, str]) -> set[str]:
    """What runs of ``file``: its tests, or checks that a test calls on several ranks."""
    stem, found = Path(file).stem, set[str]()
    if stem.startswith("test_"):
        prefixes = ("test_", "Test")
    else:
        is_run = any(f"checks_of({stem})" in text for text in sources.values())
        prefixes = ("check_",) if is_run else ()
    for node in ast.parse(sources.get(file, "")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):  # the TestCase of a hypothesis state machine
            found.update(map(ast.unparse, node.targets))
    return {name for name in found if name.startswith(prefixes)}


def missing_tests(rows: Sequence[Row], sources: Mapping[str, str]) -> list[tuple[str, str]]:
    there = {file: run_of(file, sources) for row in rows for file, _ in row.shown_by}
    return [(file, test) for row in rows for file, test in row.shown_by if test not in there[file]]


def missing_words(rows: Sequence[Row], sources: Mapping[str, str]) -> set[str]:
    return {
        f"{row.section} {word}"
        for row in rows
        for texts in ["\n".join(sources.get(file, "") for file, _ in row.shown_by)]
        for word in row.words()
        if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", texts)
    }


def test_rows_name_tests() -> None:
    assert missing_tests(ROWS, SOURCES) == []


def test_the_tests_of_a_row_have_its_names() -> None:
    assert missing_words(ROWS, SOURCES) == set(UNWRITTEN)


def test_what_is_missing_is_found() -> None:
    page = """
## 5.3. A section
| in Apex | here | difference | shown by |
|---|---|---|---|
| `a.step(x)` · `copy` | supported |  | `a/test_a.py::test_a, test_b` · `a/b_checks.py::check_b` |
| a word | differs | So. | |
| `step` | refused | So. | `a/c_checks.py::check_c` |
"""
    sources = {
        "a/test_a.py": "run(checks_of(b_checks))\ndef test_a(): stepped()",
        "a/b_checks.py": "def check_b(): copy()",
        "a/c_checks.py": "def check_c(): a.step()",
    }
    rows = rows_of(page)
    assert [len(row.names) for row in rows] == [2, 1, 1]
    missing = [("a/test_a.py", "test_b"), ("", ""), ("a/c_checks.py", "check_c")]
    assert missing_tests(rows, sources) == missing
    assert missing_words(rows, sources) == {"5.3 step"}


def test_names_are_there_once() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


def test_what_differs_says_why() -> None:
    assert [row for row in ROWS if row.verdict != "supported" and not row.difference] == []
    assert [row for row in ROWS if row.difference and not row.difference.endswith(".")] == []


def test_rows_are_counted() -> None:
    counts = Counter(row.verdict for row in ROWS for _ in row.names)
    told = ", ".join(f"{counts.pop(kind)} {kind}" for kind in ("supported", "differs", "refused"))
    assert f"\n{len(NAMES)} names: {told}.\n" in PAGE
    assert not counts


@pytest.mark.parametrize(
    ("prefix", "numbers"), [("10 A-", range(1, 41)), ("B ", range(1, 20))], ids=["bugs", "forms"]
)
def test_every_number_has_a_row(prefix: str, numbers: range) -> None:
    assert all(any(name.startswith(f"{prefix}{n}:") for name in NAMES) for n in numbers)
