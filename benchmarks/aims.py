# SPDX-License-Identifier: BSD-3-Clause
"""What was aimed at for the fused step with half weights, and what was reached."""

from __future__ import annotations

from collections.abc import Iterable

from preamp_bench.records import Record

TARGETS = """\
### What was aimed at

The aim for a step with half weights and `FusedAdam` on a CPU: 1.6 times as fast as naive torch
and 1.25 times as fast as `GradScaler` on float32 weights, 2 and 1.5 times with clipping; 75 % of
a copy's speed; a cost per parameter that does not grow from 10⁶ to 10⁸ parameters. Reached, at
the best half level of each case, as a factor over the rival (more is faster):
"""

HELD_BACK = """\
What holds it back. Where numba is installed one kernel reads half gradients, updates masters
and rounds half weights in one pass (`backend="jit"`). With ten large tensors it is memory that
takes the time: a step moves 30 bytes for each parameter and fused AdamW on float32 28, so
without clipping there is little to win on a machine whose single thread fills its memory;
rounding to bfloat16, for which AVX2 has no instruction, costs a sixth of the update. With
thousands of small tensors the engine's books take 3 µs for each, measured with the operations
left out (2 were aimed at; one pass over a column of 1,000 tensors that reads their `grad` takes
0.09 for each here, and there are two dozen), and the update 1.7, most of it to find out where
tensors lie. On a GPU, where one kernel does all of it, nothing has been measured.
"""


def table(cases: Iterable[list[Record]]) -> list[str]:
    """Write what the fused half step reached, case by case.

    Args:
        cases: Rows of the latest run of each.

    Returns:
        Lines of Markdown.
    """
    lines = [
        TARGETS,
        "| half | parameters | tensors | clips | naive torch | GradScaler | of a copy | ns each |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for case in cases:
        measured = [row for row in case if row["status"] == "measured"]
        best = {row["name"]: row["best"] for row in measured}
        ours = [
            r for r in measured if r["name"] in ("preamp O2, FusedAdam", "preamp O5, FusedAdam")
        ]
        if not ours:
            continue
        row = min(ours, key=lambda row: row["best"])
        over = [
            f"{best[rival] / row['best']:.2f}×" if rival in best else ""
            for rival in ("torch, naive", "GradScaler + fused AdamW")
        ]
        each = row["best"] * 1e6 / row["parameters"]
        clips = "yes" if row["clip"] else "no"
        lines.append(
            f"| {row['half']} | {row['parameters']:,} | {row['tensors']:,} | {clips} | {over[0]}"
            f" | {over[1]} | {row['share_of_copy']:.0%} | {each:.2f} |"
        )
    return [*lines, "", HELD_BACK]
