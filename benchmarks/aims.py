# SPDX-License-Identifier: BSD-3-Clause
"""What was aimed at for the fused step with half weights, and what was reached."""

from __future__ import annotations

from collections.abc import Iterable

from preamp_bench.records import Record

AIMS = {10: (1.2, 1.6), 300: (1.6, 2.0), 1000: (2.0, 2.8), 10_000: (2.5, 3.5)}
"""By number of tensors the factors over `GradScaler`, without clipping and with it."""

TARGETS = """\
### What was aimed at

For a step with half weights and `FusedAdam` on a CPU: the factors over `GradScaler` on float32
weights that stand in brackets (more is faster), which are about those of the same kernels with next
to no bookkeeping around them; 90 % of a copy's speed with clipping; a cost per parameter that does
not grow from 10⁶ to 10⁸ parameters. Reached, at the best half level of each case:
"""

HELD_BACK = """\
What holds it back. With a million parameters in ten tensors it is the half a millisecond of Python
that a step takes whatever its size. With larger ones it is memory. A step moves 30 bytes for each
parameter, or 28, and a single thread reaches the speed of a copy, or half as much again where the
processor has AVX-512; the float32 step of torch moves 40, or 52 with clipping, about as fast. So
28 bytes for 40 and 30 for 52 are what there is to win, and it is won with 10⁸ parameters, where
Python is nothing. Without AVX-512 rounding to bfloat16 costs a sixth of the update besides. With
two threads the kernels alone are 1.7 times as fast as with one, where a copy is 1.9 times, and less
in these rows, where the threads of torch's own pool, which wait for work by spinning, take one
of two cores. With thousands of small tensors it is what is done for each of them: two to three
microseconds of the engine's bookkeeping, and two within the update, to find out whether each tensor
is as it was and where it lies. The sections below have both by themselves. Rows of "AMD EPYC"
without more are of a machine with AVX-512, before these kernels. On a GPU, where one kernel does
all of it, nothing has been measured.
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
        "| half | parameters | tensors | clips | naive torch | GradScaler | of a copy | ns each"
        " | on |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
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
        threads = row["threads"]
        where = row["device"] + (f", {threads} threads" if threads > 1 else "")
        if row["tensors"] in AIMS:
            over[1] += f" ({AIMS[row['tensors']][row['clip']]}×)"
        lines.append(
            f"| {row['half']} | {row['parameters']:,} | {row['tensors']:,} | {clips} | {over[0]}"
            f" | {over[1]} | {row['share_of_copy']:.0%} | {each:.2f} | {where} |"
        )
    return [*lines, "", HELD_BACK]
