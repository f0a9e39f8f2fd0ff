# SPDX-License-Identifier: BSD-3-Clause
"""The measured numbers of the README and of the page on speed are those of the committed rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_first_table_is_the_latest_run_of_the_demo() -> None:
    newest = (ROOT / "benchmarks/results/demo.jsonl").read_text("utf-8").splitlines()[-1]
    levels = json.loads(newest)["levels"]
    columns = [levels[name] for name in ("O0", "autocast", "O5")]

    def row(name: str, form: str, values: list[float]) -> list[str]:
        return [name, *(form.format(value) for value in values), f"×{values[-1] / values[0]:.2f}"]

    def both(one: str, other: str) -> list[float]:
        return [level[one] + level[other] for level in columns]

    rows = [
        row("weights and gradients, bytes per parameter", "{:.0f}", both("weights", "gradients")),
        row(
            "masters and optimizer state, bytes per parameter",
            "{:.0f}",
            both("masters", "optimizer state"),
        ),
        row("sum", "{:.0f}", [level["sum"] for level in columns]),
        row("activations kept for the backward", "{:.1f} MiB", [one["kept"] for one in columns]),
        row("fastest step", "{:.1f} ms", [level["ms"] for level in columns]),
        row("held-out loss, bits per byte", "{:.3f}", [level["held_out"] for level in columns]),
    ]
    readme = list(map(cells, (ROOT / "README.md").read_text("utf-8").splitlines()))
    assert [row for row in rows if row not in readme] == []


def test_the_tables_of_times_are_what_the_rows_say() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "benchmarks"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [cells(line)[:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    page = list(map(cells, (ROOT / "docs/speed.md").read_text("utf-8").splitlines()))

    def is_said(row: list[str]) -> bool:
        case, *rest = row
        several = [case.removeprefix("update of "), *rest]
        steps = [case, *rest[:5], rest[-1]]  # whole steps are not timed with split and compact
        return several in page or steps in page

    assert len(printed) > 20
    assert [row for row in printed[2:] if not is_said(row)] == []
