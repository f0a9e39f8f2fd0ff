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
What holds it back. On float32 values torch's fused kernel runs at the speed of memory here, and it
is what the blocks of a step with half weights run as well. But no kernel of torch reads or writes
half values in the same pass. Widening and unscaling gradients and rounding weights are passes of
their own, over a block in the cache, and take about as long as half values save: of 12 ms for 10⁷
parameters AdamW has 5, widening and unscaling 1.8, rounding 1.3, the norm 2.3, and Python the rest.
With thousands of small tensors the time goes into Python: about 25 µs for each tensor, most of it
to keep the books on its gradient, where torch's loops take 12. On a GPU, where one kernel does all
of it, nothing has been measured.
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
