# SPDX-License-Identifier: BSD-3-Clause
"""The page of what works of Apex is in order, and each of its rows names tests that show it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    names: list[str]  # with their section: "5.3 `step`"
    verdict: str
    difference: str
    shown_by: list[str]  # file::test


def rows_of(page: str) -> list[Row]:
    """Names that share a row are separated by points in the middle of the line, as tests are."""
    rows, section = [], ""
    for line in page.splitlines():
        if heading := re.match(r"## ([\w.]+)\. ", line):
            section = heading[1]
        elif (cells := re.fullmatch(rf"\|{CELL * 4}", line)) and cells[2] != "here":
            shown = [one.strip("`").partition("::") for one in cells[4].split(" · ")]
            tests = [f"{file}::{test}" for file, _, some in shown for test in some.split(", ")]
            names = [f"{section} {name}" for name in cells[1].split(" · ")]
            rows.append(Row(names, cells[2], cells[3], tests))
    return rows


ROWS = rows_of(PAGE)
NAMES = [name for row in ROWS for name in row.names]


def what_runs(sources: Mapping[str, str]) -> set[str]:
    """Tests, also those that are a state machine's, and checks that a test calls on ranks."""
    found, everything = set[str](), "\n".join(sources.values())
    for file, text in sources.items():
        stem, prefixes = Path(file).stem, ("test_", "Test")
        if not stem.startswith("test_"):
            prefixes = ("check_",) if f"checks_of({stem})" in everything else ()
        for node in ast.parse(text).body:
            name = getattr(node, "name", "")
            if isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
            if name.startswith(prefixes):
                found.add(f"{file}::{name}")
    return found


def missing(rows: Sequence[Row], sources: Mapping[str, str]) -> set[str]:
    """Tests that do not run, and words, as ``flatten`` of ``apex_C.flatten``, that no file has."""
    found = {test for row in rows for test in row.shown_by} - what_runs(sources)
    for row in rows:
        texts = "\n".join(sources.get(test.split("::")[0], "") for test in row.shown_by)
        for name in row.names:
            for code in re.findall(r"`([\w.]+)", name):
                word = code.split(".")[-1]
                if not re.search(rf"(?<!\w){word}(?!\w)", texts):
                    found.add(f"{name.split()[0]} {word}")
    return found


def test_rows_name_tests_that_run_and_have_their_words() -> None:
    assert missing(ROWS, SOURCES) == set(UNWRITTEN)


def test_what_is_missing_is_found() -> None:
    page = """
## 5.3. A section
| `a.step(x)` · `copy` | supported |  | `a/test_a.py::test_a, test_b` · `a/b_checks.py::check_b` |
| a word | differs | So. | |
| `step` | refused | So. | `a/c_checks.py::check_c` |
"""
    sources = {
        "a/test_a.py": "run(checks_of(b_checks))\ndef test_a(): stepped()",
        "a/b_checks.py": "def check_b(): copy()",
        "a/c_checks.py": "def check_c(): a.step()",
    }
    absent = {"a/test_a.py::test_b", "::", "a/c_checks.py::check_c", "5.3 step"}
    assert missing(rows_of(page), sources) == absent


def test_what_differs_says_why() -> None:
    assert [row for row in ROWS if row.verdict != "supported" and not row.difference] == []
    assert [row for row in ROWS if row.difference and not row.difference.endswith(".")] == []


def test_rows_are_counted() -> None:
    assert len(set(NAMES)) == len(NAMES)
    counts = Counter(row.verdict for row in ROWS for _ in row.names)
    told = ", ".join(f"{counts.pop(kind)} {kind}" for kind in ("supported", "differs", "refused"))
    assert f"\n{len(NAMES)} names: {told}.\n" in PAGE
    assert not counts


def test_every_number_has_a_row() -> None:
    known = {name.split(":")[0] for name in NAMES}
    assert known >= {f"10 A-{n}" for n in range(1, 41)} | {f"B {n}" for n in range(1, 20)}
