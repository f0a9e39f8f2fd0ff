# SPDX-License-Identifier: BSD-3-Clause
"""The page of what works of Apex is in order, and its rows name files of tests that show them."""

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
    "6 _update_scale": "step calls it, and the tests step",
    "9.5 multiproc": "the test takes every name of REFUSED",
    "9.7 MLP": "the test takes every name of REFUSED",
}
"""Section and word → why no test of its row has it as text."""


class Row(NamedTuple):
    names: list[str]  # with their section: "5.3 `step`"
    verdict: str
    difference: str
    shown_by: list[str]  # files of tests


def rows_of(page: str) -> list[Row]:
    """Names that share a row are separated by points in the middle of the line, as files are."""
    rows, section = [], ""
    for line in page.splitlines():
        if heading := re.match(r"## ([\w.]+)\. ", line):
            section = heading[1]
        elif (cells := re.fullmatch(rf"\|{CELL * 4}", line)) and cells[2] != "here":
            files = [file.strip("`") for file in cells[4].split(" · ")]
            names = [f"{section} {name}" for name in cells[1].split(" · ")]
            rows.append(Row(names, cells[2], cells[3], files))
    return rows


ROWS = rows_of(PAGE)
NAMES = [name for row in ROWS for name in row.names]


def missing(rows: Sequence[Row], sources: Mapping[str, str]) -> set[str]:
    """Files that are not there, and words, ``flatten`` of ``apex_C.flatten``, that none has."""
    found = {file for row in rows for file in row.shown_by} - set(sources)
    for row in rows:
        texts = "\n".join(sources.get(file, "") for file in row.shown_by)
        for name in row.names:
            for code in re.findall(r"`([\w.]+)", name):
                word = code.split(".")[-1]  # of errors, books of refusals have the names
                if not word.endswith("Error") and not re.search(rf"(?<!\w){word}(?!\w)", texts):
                    found.add(f"{name.split()[0]} {word}")
    return found


def test_rows_name_files_that_have_their_words() -> None:
    assert missing(ROWS, SOURCES) == set(UNWRITTEN)


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
