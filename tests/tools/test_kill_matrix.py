# SPDX-License-Identifier: BSD-3-Clause
"""The matrix of faults: who notices which, who is spare, and what must not be counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kill_matrix
import planted_faults
from alias.harness import run_python

FILES = {
    "src/tiny/sums.py": """
from dataclasses import dataclass

def doubled(function):
    def double(x):
        return 2 * function(x)
    return double
@doubled
def above(x):
    return x > 3
@dataclass(frozen=True, slots=True)
class Sum:
    first: int
    def total(self, other):
        found = self.first + other
        if found == 99:
            found = 0
        return found
def count(n):
    while n > 10:
        n -= 1
    return n
def in_another(x):
    return x - 1
""",
    "tests/test_sums.py": """
import os, pytest, time
from tiny.sums import Sum, above, count, in_another

def test_above():
    time.sleep(.5)
    assert above(4) == 2
    assert above(3) == 0
def test_below():
    assert above(3) == 0
@pytest.mark.parametrize("other", [2, 3])
def test_total(other):

    assert Sum(1).total(other) == 1 + other
def test_total_again():
    assert Sum(2).total(2) == 4
def test_count():
    time.sleep(.5)
    assert count(12) == 10
def test_in_another_process():
    assert Sum(2).total(3) == 5
    os.wait() if os.fork() else os._exit(in_another(1))
def test_fails():
    assert above(4) == 3
""",
    "tools/planted_faults.py": """
FAULTS = {
    "src/tiny/sums.py": (("return 2 * function(x)", "return 3 * function(x)"),)}
""",
}

Rows = dict[str, dict[str, Any]]


def call(folder: Path, *arguments: str, status: int = 0) -> str:
    done = run_python((kill_matrix.__file__, *arguments), folder, PYTHONPATH="src")
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(folder: Path, *arguments: str) -> Rows:
    """The rows of a run, by the words for each fault."""
    call(folder, "run", "src/tiny/sums.py", "--limit", "1", "--out", *arguments)
    rows = kill_matrix.read([folder / arguments[0]])[1]
    return {row["fault"].split(": ", 1)[1]: row for row in rows}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    folder = tmp_path_factory.mktemp("tiny")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder, run(folder, "drawn.jsonl", "--jobs", "2")


def told(row: dict[str, Any]) -> tuple[str, list[str]]:
    return row["state"], sorted(name.partition("::")[2] for name in row["noticed"])


@pytest.mark.full
def test_it_tells_who_notices(tiny: tuple[Path, Rows]) -> None:
    drawn = tiny[1]
    above = told(drawn["x > 3 → x >= 3"])  # of a function in a decorator's cell
    assert above == ("noticed", ["test_above", "test_below"])
    total = ["test_in_another_process", "test_total", "test_total_again"]
    plus = "self.first + other → self.first - other"  # of a class that has been made twice
    assert told(drawn[plus]) == ("noticed", total)
    assert told(drawn["always found == 99"]) == ("noticed", total)
    assert told(drawn["never found == 99"]) == ("not noticed", [])
    assert told(drawn["x - 1 → x + 1"]) == ("not reached", [])
    assert drawn["without n -= 1"]["noticed"] == {"tests/test_sums.py::test_count": "hang"}


@pytest.mark.full
def test_a_planted_fault_is_noticed_and_tried_once(tiny: tuple[Path, Rows]) -> None:
    rows = run(tiny[0], "planted.jsonl", "--planted")
    assert [told(row) for row in rows.values()] == [("noticed", ["test_above"])]
    assert run(tiny[0], "planted.jsonl", "--planted") == rows
    written = (tiny[0] / "planted.jsonl").read_text("utf-8")
    assert written.count('"fault"') == 1
    # What tests enter is known from the run that was ended, and not looked for again.
    rest = run(tiny[0], "planted.jsonl")
    assert told(rest["x > 3 → x >= 3"])[0] == "noticed"
    assert (tiny[0] / "planted.jsonl").read_text("utf-8").count('"tests"') == 1


@pytest.mark.full
def test_until_asks_the_shortest_tests_first_and_no_more(tiny: tuple[Path, Rows]) -> None:
    whole, rows = tiny[1], run(tiny[0], "until.jsonl", "--until", "1")
    assert told(rows["x > 3 → x >= 3"]) == ("noticed", ["test_below"])
    for what, row in rows.items():
        assert row["state"] == whole[what]["state"]
        assert len(row["noticed"]) == min(len(whole[what]["noticed"]), 1)
    printed = call(tiny[0], "spare", "until.jsonl", status=1)
    assert "not all tests were asked for" in printed
    assert "Run without --until" in printed


@pytest.mark.full
def test_spare_names_what_others_do_too(tiny: tuple[Path, Rows]) -> None:
    names = ["    4 tests/test_sums.py::test_total", "1 tests, 4 lines"]  # the longest of three
    assert call(tiny[0], "spare", "drawn.jsonl").splitlines() == names
    printed = call(tiny[0], "spare", "--keep", "1", "drawn.jsonl")
    assert [name in printed for name in ("above", "below", "count", "another")] == [1, 0, 0, 0]


@pytest.mark.full
def test_diff_names_what_is_lost(tiny: tuple[Path, Rows], capsys: Any) -> None:
    before, after = str(tiny[0] / "drawn.jsonl"), str(tiny[0] / "after.jsonl")
    rows = tiny[1] | {"x > 3 → x >= 3": {**tiny[1]["x > 3 → x >= 3"], "state": "not noticed"}}
    Path(after).write_text("\n".join(map(json.dumps, rows.values())), "utf-8")
    assert kill_matrix.main(["diff", before, after]) == 1
    assert "not noticed: src/tiny/sums.py:10:11: x > 3 → x >= 3" in capsys.readouterr().out
    assert kill_matrix.main(["diff", before, before]) == 0


def test_each_planted_fault_changes_a_function(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("A = 1\n\ndef f():\n    return A + 2\n", "utf-8")
    for old, new in (("A + 2", "(A + 2)"), ("A = 1", "A = 2"), ("A", "B")):
        with pytest.raises(SystemExit, match=r"no function changes with|has 2 times: 'A'$"):
            kill_matrix.planted(str(tmp_path / "f.py"), old, new)
    rows = [(file, *pair) for file, pairs in planted_faults.FAULTS.items() for pair in pairs]
    assert len({kill_matrix.planted(*row)[0]["fault"] for row in rows}) == len(rows) >= 40
