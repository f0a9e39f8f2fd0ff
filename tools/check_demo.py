# SPDX-License-Identifier: BSD-3-Clause
"""Check the ``results.json`` of a short demo run of all opt levels.

What its numbers must say; that they are there follows from asking for them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF_WEIGHTS = {"O2": "fp16", "O3": "fp16", "O5": "bf16"}
WITH_MASTERS = ("O2", "O5")
LOST_AT_MOST = 0.01  # held-out bits per byte against O0, at the same number of applied steps
MAY_FAIL = ("O3",)


def main() -> int:
    """Print what is wrong; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()

    document = json.loads(args.results.read_text(encoding="utf-8"))
    report = args.results.with_name("report.html")
    problems = problems_of(document, args.steps)
    if not (report.is_file() and "<svg" in report.read_text(encoding="utf-8")):
        problems.append(f"{report.name} is missing or has no curve")
    for problem in problems:
        print(f"{args.results}: {problem}", file=sys.stderr)
    print(f"{len(document['levels'])} levels in {args.results.name}, {len(problems)} problems")
    return 1 if problems else 0


def problems_of(document: dict[str, Any], steps: int) -> list[str]:
    """Return one line for each statement of the file that cannot be true."""
    rows = {row["level"]: row for row in document["levels"]}
    if set(rows) != set(LEVELS):
        return [f"levels are {sorted(rows)}, not {list(LEVELS)}"]
    found = ["the run was interrupted"] if document["interrupted"] else []
    for level, row in rows.items():
        found += [f"{level}: {line}" for line in _row_problems(row, steps)]
    return found


def _row_problems(row: dict[str, Any], steps: int) -> list[str]:
    level = row["level"]
    if row["status"] != "finished":
        return [] if level in MAY_FAIL else [f"{row['status']}: {row['reason']}"]
    return [
        *_training_problems(row, steps),
        *_precision_problems(level, row["dtypes"], row["memory"]),
    ]


def _training_problems(row: dict[str, Any], steps: int) -> list[str]:
    found: list[str] = []
    if row["steps_done"] != steps or len(row["losses"]) != steps:
        found.append(f"{row['steps_done']} steps done, {len(row['losses'])} losses, not {steps}")
    if not row["best_seconds"] or row["best_seconds"] > row["median_seconds"]:
        found.append("step times are missing or the best is longer than the median")
    if row["level"] in MAY_FAIL:
        return found
    if not row["losses"][-1] < row["losses"][0]:
        found.append(f"loss went from {row['losses'][0]} to {row['losses'][-1]}")
    # A skipped step is one step less of so few: then the comparison says nothing.
    if not row["steps_skipped"] and abs(row["held_out_ratio"] - 1) > LOST_AT_MOST:
        found.append(f"held-out bits per byte are {row['held_out_ratio']:.4f} of O0's")
    return found


def _precision_problems(level: str, dtypes: dict[str, str], memory: dict[str, float]) -> list[str]:
    found: list[str] = []
    if dtypes["weights"] != HALF_WEIGHTS.get(level, "fp32"):
        found.append(f"weights are {dtypes['weights']}")
    if (dtypes["masters"] != "none") != (level in WITH_MASTERS):
        found.append(f"masters are {dtypes['masters']}")
    if (memory["masters"] > 0) != (level in WITH_MASTERS):
        found.append(f"masters take {memory['masters']} bytes per parameter")
    if memory["weights"] > (2.1 if level in HALF_WEIGHTS else 4.1):
        found.append(f"weights take {memory['weights']} bytes per parameter")
    return found


if __name__ == "__main__":
    sys.exit(main())
