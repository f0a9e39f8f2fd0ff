# SPDX-License-Identifier: BSD-3-Clause
"""Print what ``benchmarks/results`` has, as tables in Markdown: of times, and of what is learned.

Shown is the machine of the newest row of each benchmark, and of every case there the latest run.
Times are of updates and whole steps, the best of all rounds, in milliseconds; – is not measured.
The last column is the time of preamp with `FusedAdam` over that of torch's own way.
Scores are means over seeds, with the difference to float32 of the same seed beside them, mean ±
standard deviation; in the row of float32 itself that of the scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, stdev

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


SCORES = (("convnet", "loss"), ("convnet", "errors"), ("gpt", "bits per byte"))


def learned(rows: Iterable[Record]) -> list[list[str]]:
    """The table of the last run of each way to keep a model, the most bytes first."""
    latest = {(row["name"], row["task"]): row for row in rows if row["status"] == "measured"}
    table: dict[str, tuple[float, list[str]]] = {}
    for name in dict.fromkeys(name for name, _ in latest):
        cells = [name]
        for task, score in SCORES:
            scores, plain = (latest[way, task]["scores"][score] for way in (name, "float32"))
            over = [ours - theirs for ours, theirs in zip(scores, plain, strict=True)]
            told = f"{mean(over):+.4f} ± {stdev(over):.4f}"
            cells += [f"{mean(scores):.4f}", f"± {stdev(plain):.4f}" if scores is plain else told]
        held = mean(latest[name, "gpt"]["scores"]["bytes per parameter"])
        table[name] = held, [*cells, f"{held:.2f}"]
    return [cells for _, cells in sorted(table.values(), key=lambda row: -row[0])]


def show(lines: list[list[str]]) -> None:
    """Print a table, whose first line is its headings."""
    marked = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    print(*(f"| {' | '.join(cells)} |" for cells in marked), sep="\n")


def main() -> None:
    """Print both tables."""
    asked(__doc__)
    headings = ["case", "level", *COLUMNS, "over torch's", "commit"]
    lines = [headings]
    for name, fields in CASES.items():
        file = RESULTS / f"{name}.jsonl"
        rows = read(file) if file.exists() else []
        rows = [row for row in rows if row.get("clip", True) and row["threads"] == 1]
        lines += map(line, newest(rows, fields))
        if rows:
            machine = max(rows, key=lambda row: row["date"])
            print("{}: {device}, torch {torch}, Python {python}".format(name, **machine))
    show(lines)
    storages = RESULTS / "storage.jsonl"
    if storages.exists():
        columns = [cell for _, score in SCORES for cell in (score, "to float32")]
        show([["trained as", *columns, "B/param"], *learned(read(storages))])


if __name__ == "__main__":
    main()
