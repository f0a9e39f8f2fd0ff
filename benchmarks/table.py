# SPDX-License-Identifier: BSD-3-Clause
"""Print what ``benchmarks/results`` has of updates and whole steps, as one table in Markdown.

Shown is the machine of the newest row of each benchmark, and of every case there the latest run.
Times are the best of all rounds, in milliseconds; – is not measured. The last column is the time
of preamp with `FusedAdam` over that of torch's own way.
"""

from __future__ import annotations

from collections.abc import Iterable

from preamp_bench.options import RESULTS, asked
from preamp_bench.records import Record, read

CASES = {"step": ("parameters", "tensors", "half"), "train": ("model", "level")}
"""Benchmark → what tells its cases apart."""

HALVES = {"float16": "O2", "bfloat16": "O5"}
"""The level whose update is timed for each half dtype."""

COLUMNS = {
    "by hand": ("torch, naive", "{level} by hand"),
    "torch's own": ("GradScaler + fused AdamW", "bf16 autocast by hand"),
    "torch AdamW": ("preamp {level}, torch AdamW",),
    "FusedAdam": ("preamp {level}, FusedAdam",),
    "split": ("preamp {level} split, FusedAdam",),
    "compact": ("preamp {level} compact, FusedAdam",),
}
"""Column → the names of its rows, an update's and a step's."""


def newest(rows: Iterable[Record], fields: Iterable[str]) -> list[list[Record]]:
    """Take the machine of the newest row, and the latest run of each of its cases."""
    rows, fields = list(rows), tuple(fields)
    device = max(rows, key=lambda row: row["date"])["device"] if rows else ""
    runs: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for row in rows:
        if row["device"] == device:
            case = tuple(row[field] for field in fields)
            runs.setdefault(case, {}).setdefault(row["date"], []).append(row)
    return [runs[case][max(runs[case])] for case in sorted(runs)]


def number(milliseconds: float | None) -> str:
    """Three digits, or all before the point."""
    if milliseconds is None:
        return "–"
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:#.3g}"


def line(case: list[Record]) -> list[str]:
    """The cells of a case."""
    row = case[0]
    level = row["level"] if "level" in row else HALVES[row["half"]]
    what = row.get("model") or f"update of {row['parameters']:,} in {row['tensors']:,}"
    best = {row["name"]: row["best"] for row in case if row["status"] == "measured"}
    times = {
        column: next(
            (best[name] for name in (n.format(level=level) for n in names) if name in best), None
        )
        for column, names in COLUMNS.items()
    }
    ours, theirs = times["FusedAdam"], times["torch's own"]
    ratio = f"{ours / theirs:.2f}" if ours and theirs else "–"
    return [what, level, *map(number, times.values()), ratio, row["commit"]]


def main() -> None:
    """Print the table."""
    asked(__doc__)
    headings = ["case", "level", *COLUMNS, "over torch's", "commit"]
    lines = [headings, ["---"] * len(headings)]
    for name, fields in CASES.items():
        file = RESULTS / f"{name}.jsonl"
        rows = read(file) if file.exists() else []
        rows = [row for row in rows if row.get("clip", True) and row["threads"] == 1]
        lines += map(line, newest(rows, fields))
        if rows:
            machine = max(rows, key=lambda row: row["date"])
            print("{}: {device}, torch {torch}, Python {python}".format(name, **machine))
    print(*(f"| {' | '.join(cells)} |" for cells in lines), sep="\n")


if __name__ == "__main__":
    main()
