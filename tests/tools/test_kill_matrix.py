# SPDX-License-Identifier: BSD-3-Clause
"""The matrix of faults: who notices which, who is spare, and what must not be counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import faults
import kill_matrix
import kill_rows
import planted_faults

FILES = {
    "src/tiny/__init__.py": "",
    "src/tiny/room/__init__.py": "",
    "src/tiny/room/sums.py": """
from dataclasses import dataclass

START = 10


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
    while n > START:
        n -= 1
    return n


def alone():
    kept = [1]
    kept.append(2)
    return kept


def in_another(x):
    return x - 1
""",
    "tests/room/test_sums.py": """
import os, pytest
from tiny.room.sums import Sum, above, alone, count, in_another


def test_above():
    assert above(4) == 2
    assert above(3) == 0


def test_below():
    assert above(3) == 0


@pytest.mark.parametrize("other", [2, 3])
def test_total(other):

    assert Sum(1).total(other) == 1 + other


def test_total_again():
    assert Sum(2).total(2) == 4


def test_a_third_total():
    assert Sum(2).total(3) == 5


def test_enters_only():
    alone()


def test_count():
    assert count(12) == 10


def test_in_another_process():
    if os.fork() == 0:
        in_another(1)
        os._exit(0)
    os.wait()
""",
    "src/tiny/odd/__init__.py": "",
    "src/tiny/odd/other.py": """
def other(x):
    return x + 1


other.__code__ = other.__code__.replace(co_name="another")
""",
    "tests/odd/test_other.py": """
from tiny.odd.other import other


def test_other():
    assert other(1) == 2
""",
    "faults.py": """
FAULTS = {
    ("room/sums.py", "room"): (
        ("START = 10", "START = 11"),
        ("return 2 * function(x)", "return 3 * function(x)"),
        ("kept.append(2)", "kept.append(3)"),
    ),
}
""",
}

Rows = list[dict[str, Any]]


def call(folder: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, kill_matrix.__file__, *arguments, "--root", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(folder: Path, out: str, *arguments: str) -> tuple[str, dict[str, Any], Rows]:
    given = ("--room", "room", "--hang", "1", "--out", str(folder / out))
    printed = call(folder, "run", *given, *arguments)
    header, *rows = map(json.loads, (folder / out).read_text("utf-8").splitlines())
    return printed, header, rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def drawn(tiny: Path) -> tuple[dict[str, Any], Rows]:
    _, header, rows = run(tiny, "drawn.jsonl")
    return header, rows


def state_of(rows: Rows, what: str) -> tuple[str, list[str]]:
    (row,) = [row for row in rows if row["what"] == what]
    return row["state"], sorted(name.partition("::")[2] for name in row["noticed"])


def test_it_tells_who_notices(drawn: tuple[dict[str, Any], Rows]) -> None:
    _, rows = drawn
    above = state_of(rows, "x > 3 → x >= 3")  # of a function in a decorator's cell
    assert above == ("noticed", ["test_above", "test_below"])
    total = ["test_a_third_total", "test_total", "test_total_again"]
    plus = "self.first + other → self.first - other"  # of a class that has been made twice
    assert state_of(rows, plus) == ("noticed", total)
    assert state_of(rows, "always found == 99") == ("noticed", total)
    assert state_of(rows, "never found == 99") == ("not noticed", [])
    assert state_of(rows, "without kept.append(2)") == ("not noticed", [])
    assert state_of(rows, "x - 1 → x + 1") == ("not reached", [])


def test_a_test_that_hangs_notices(tiny: Path, drawn: tuple[dict[str, Any], Rows]) -> None:
    (row,) = [row for row in drawn[1] if row["what"] == "without n -= 1"]
    assert row["noticed"] == {"tests/room/test_sums.py::test_count": "hang"}
    assert "2 hang" in call(tiny, "report", str(tiny / "drawn.jsonl"))


def test_what_is_not_in_a_function_is_tried_in_a_copy(tiny: Path) -> None:
    table = ("--planted", "--table", str(tiny / "faults.py"))
    printed, _, rows = run(tiny, "planted.jsonl", *table)
    assert state_of(rows, "START = 10 → START = 11") == ("noticed", ["test_count"])
    assert state_of(rows, "return 2 * function(x) → return 3 * function(x)")[1] == ["test_above"]
    assert state_of(rows, "kept.append(2) → kept.append(3)") == ("not noticed", [])
    assert "3 faults of 3: 2 noticed, 1 not noticed" in printed


def test_a_function_whose_code_is_not_found_counts_as_an_error(tiny: Path) -> None:
    printed = call(tiny, "run", "--room", "odd", "--out", str(tiny / "odd.jsonl"), status=1)
    assert "1 faults of 1: 0 noticed, 0 not noticed, 0 not reached, 1 NOT PLANTED" in printed


def test_it_goes_on_where_it_ended(tiny: Path) -> None:
    _, _, none = run(tiny, "late.jsonl", "--every", "6", "--seconds", "0")
    assert none == []
    _, _, rows = run(tiny, "late.jsonl", "--every", "6", "--jobs", "2", "--enough", "1")
    _, _, again = run(tiny, "late.jsonl", "--every", "6")
    assert "faults were tried: more may keep" in call(tiny, "spare", str(tiny / "late.jsonl"))
    assert len({kill_rows.key_of(row) for row in rows}) == len(rows) >= 3
    assert again == rows
    assert {len(row["noticed"]) for row in rows} == {0, 1}
    others = ("--tests", "tests/odd", "--out", str(tiny / "late.jsonl"))
    assert "name another file" in call(tiny, "run", "--room", "room", *others, status=1)


def test_spare_names_what_others_do_too(tiny: Path, drawn: tuple[dict[str, Any], Rows]) -> None:
    assert drawn
    assert call(tiny, "spare", str(tiny / "drawn.jsonl")).splitlines() == [
        "    4 tests/room/test_sums.py::test_total",  # the longest of three
        "1 tests, 4 lines",
    ]
    names = call(tiny, "spare", "--keep", "1", str(tiny / "drawn.jsonl"))
    assert "test_above" in names
    assert "test_below" not in names
    assert "test_count" not in names
    assert "test_in_another" not in names
    assert "more may keep" not in names


def row(line: int, *noticed: str) -> dict[str, Any]:
    names = dict.fromkeys(noticed, "failed")
    return {"file": "f.py", "mask": hex(1 << line), "noticed": names}


def test_spare_keeps_what_it_cannot_judge() -> None:
    def entering(*lines: int, unseen: bool = False) -> dict[str, Any]:
        return {"lines": {"f.py": hex(sum(1 << line for line in lines))}, "unseen": unseen}

    tests = {
        "alone[1]": entering(1, 2),
        "alone[2]": entering(9),  # where no fault was noticed, and nobody else comes
        "ranks": entering(1, unseen=True),
        "without": entering(1),
        "plain": entering(1, 2, 3),
        "other": entering(1, 2, 3),
        "last": entering(1, 2, 3),
    }
    header = {"tests": tests}
    rows = [row(1, "alone", "ranks", "plain", "other", "last"), row(2), row(3, "plain", "other")]
    assert kill_rows.spare(header, rows, {"alone": 9, "ranks": 9, "plain": 5}, 1) == [
        "plain",
        "last",
    ]
    assert kill_rows.spare(header, rows, {}, 2) == ["last"]


def test_diff_names_what_is_lost(
    tiny: Path, drawn: tuple[dict[str, Any], Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    header, rows = drawn
    after = tiny / "after.jsonl"
    lost = {"state": "not noticed", "noticed": {}}
    worse = [row | lost if row["what"] == "x > 3 → x >= 3" else row for row in rows]
    after.write_text("\n".join(map(json.dumps, [header, *worse])), "utf-8")
    assert kill_matrix.main(["diff", str(tiny / "drawn.jsonl"), str(after)]) == 1
    assert "room/sums.py:15: x > 3 → x >= 3" in capsys.readouterr().out
    assert kill_matrix.main(["diff", str(after), str(tiny / "drawn.jsonl")]) == 0


def test_a_fault_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("def f():\n    return 1\n", "utf-8")
    with pytest.raises(SystemExit, match="does the same"):
        faults.planted("file.py", path, "tests", "return 1", "return (1)")
    with pytest.raises(SystemExit, match="has 0 times"):
        faults.planted("file.py", path, "tests", "return 2", "return 1")


def test_each_planted_fault_stands_once_in_its_file_and_changes_it() -> None:
    args = kill_matrix.arguments(["run", "--planted"])
    count = sum(map(len, planted_faults.FAULTS.values()))
    assert len(kill_matrix.faults_of(args)) == count >= 40
    package = kill_matrix.package_of(kill_matrix.ROOT)
    assert [place for place in kill_matrix.COMPILED if not (package / place).exists()] == []
