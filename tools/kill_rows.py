# SPDX-License-Identifier: BSD-3-Clause
"""What the rows of a matrix of faults tell: who notices what, who is spare, what was lost."""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTICED, NOT_NOTICED, NOT_REACHED, NOT_PLANTED = STATES = (
    "noticed", "not noticed", "not reached", "NOT PLANTED",
)  # fmt: skip

KEY = ("file", "line", "column", "what")
"""What of a row tells its fault from all others."""

Row = dict[str, Any]


def function_of(test: str) -> str:
    """The test without the parameters of one case."""
    return test.partition("[")[0]


def read(paths: Iterable[Path]) -> tuple[Row, list[Row]]:
    """What is known of tests, and the rows of all faults."""
    header: Row = {"tests": {}, "left_out": [], "faults": 0}
    rows = []
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            if "tests" in row:
                header["tests"].update(row["tests"])
                header["left_out"] += row["left_out"]
                header["faults"] += row["faults"]
            else:
                rows.append(row)
    return header, rows


def key_of(row: Row) -> tuple[object, ...]:
    """What tells its fault from all others."""
    return tuple(row[name] for name in KEY)


def told(row: Row) -> str:
    """A fault in a line."""
    what = " ".join(row["what"].split())
    return f"  {row['file']}:{row['line']}: {what if len(what) < 160 else what[:157] + '...'}"


def report(paths: Sequence[Path]) -> int:
    """Print counts, and each fault that no test noticed."""
    header, rows = read(paths)
    states = Counter(row["state"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    counts = ", ".join(f"{states[state]} {state}" for state in STATES)
    print(f"{len(rows)} faults of {header['faults']}: {counts}; {seconds:.0f} s")
    hows = Counter(how for row in rows for how in row["noticed"].values())
    print(f"how: {', '.join(f'{count} {how}' for how, count in hows.most_common())}")
    for state in STATES[1:]:
        lines = [told(row) for row in rows if row["state"] == state]
        if lines:
            print(f"{state}:", *lines, sep="\n")
    for name in header["left_out"]:
        print(f"left out, since it fails without a fault: {name}")
    return states[NOT_PLANTED]


def lines_of(header: Row) -> dict[str, set[tuple[str, int]]]:
    """Which lines of which files each function of tests enters."""
    lines = defaultdict[str, set[tuple[str, int]]](set)
    for test, known in header["tests"].items():
        for file, mask in known["lines"].items():
            lines[function_of(test)] |= {(file, at) for at in places(mask)}
    return lines


def places(mask: str) -> list[int]:
    """The numbers of a mask's lines."""
    return [at for at, bit in enumerate(bin(int(mask, 16))[:1:-1]) if bit == "1"]


def spare(header: Row, rows: Iterable[Row], sizes: Mapping[str, int], keep: int) -> list[str]:
    """Tests that may go, the longest first, while ``keep`` notice each fault that they notice.

    One that noticed nothing was not judged, and stays. So does one that does more than this
    process sees, and one that alone enters a line where no fault was noticed.
    """
    killers = [set(row["noticed"]) for row in rows if row["noticed"]]
    judged = {(r["file"], at) for r in rows if r["noticed"] for at in places(r["mask"])}
    lines = {name: entered - judged for name, entered in lines_of(header).items()}
    stays = {function_of(test) for test, known in header["tests"].items() if known["unseen"]}
    entering = Counter(line for entered in lines.values() for line in entered)
    gone = []
    judges = set().union(*killers) & set(lines) - stays
    for name in sorted(judges, key=lambda n: (-sizes.get(n, 0), n)):
        mine = [them for them in killers if name in them]
        if all(len(them) > keep for them in mine) and all(entering[at] > 1 for at in lines[name]):
            gone.append(name)
            entering.subtract(lines[name])
            for them in mine:
                them.discard(name)
    return gone


def sizes_of(root: Path, names: Iterable[str]) -> Counter[str]:
    """Lines of test functions, with their decorators; 0 for what has no function."""
    sizes = Counter[str]()
    files = {name.partition("::")[0] for name in names}
    homes = [(file, ast.parse(Path(root, file).read_text("utf-8")).body) for file in files]
    for place, body in homes:
        for node in body:
            if isinstance(node, ast.ClassDef):
                homes.append((f"{place}::{node.name}", node.body))
            elif isinstance(node, ast.FunctionDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                sizes[f"{place}::{node.name}"] = (node.end_lineno or first) - first + 1
    return sizes


def print_spare(paths: Sequence[Path], root: Path, keep: int) -> int:
    """Print tests that may go, their lines, and which files they enter that had no fault."""
    header, rows = read(paths)
    sizes = sizes_of(root, map(function_of, header["tests"]))
    names = spare(header, rows, sizes, keep)
    lines = lines_of(header)
    everywhere = set.intersection(*lines.values())  # what a fixture of all tests does
    for name in names:
        files = {file for file, _ in lines[name] - everywhere} - {row["file"] for row in rows}
        note = f"; not judged for {', '.join(sorted(files))}" if files else ""
        print(f"{sizes[name]:5} {name}{note}")
    if len(rows) < header["faults"]:
        print(f"{len(rows)} of {header['faults']} faults were tried: more may keep a test")
    print(f"{len(names)} tests, {sum(sizes[name] for name in names)} lines")
    return 0


def diff(before: Path, after: Path) -> int:
    """Print the faults that a matrix noticed and a later one does not; how many."""
    now = {key_of(row): row["state"] for row in read([after])[1]}
    rows = read([before])[1]
    lost = [row for row in rows if row["noticed"] and now.get(key_of(row)) != NOTICED]
    for row in lost:
        print(f"{now.get(key_of(row), 'not tried')}:\n{told(row)}\n    {', '.join(row['noticed'])}")
    print(f"{len(lost)} faults were noticed, and are no more")
    return len(lost)
