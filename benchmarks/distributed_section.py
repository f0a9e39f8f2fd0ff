# SPDX-License-Identifier: BSD-3-Clause
"""The part of the page of benchmarks on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection

from preamp_bench.distributed import COLLECTIVES, WORLDS, derived
from preamp_bench.records import Record

TEXT = """\
## Several ranks

A step of four linear layers (forward, backward, clipping, AdamW) on two ranks of one machine,
joined by gloo, a thread each, next to plain DDP's and plain FSDP2's with float32 weights. Under
DDP preamp communicates nothing of its own in a step; under FSDP2 it is one all-reduce of 16
bytes, which is timed by itself, as is a larger one. Beyond two ranks nothing is measured: the
second table is **derived** by t(n) = t(2) · log2(n), the latency of a tree of messages between
two ranks with the time measured here. A network has another t(2); the number of messages is the
same. Sizes this small cost latency alone, and which of the two is the shorter one is the
machine's mood.
"""


def table(cases: Collection[list[Record]], machines_of: Callable[[list[Record]], str]) -> list[str]:
    """Write the measured rows, and what is derived from them.

    Args:
        cases: The rows of each size.
        machines_of: Names the machines of rows.

    Returns:
        Lines of Markdown.
    """
    lines: list[str] = []
    for case in cases:
        lines += [f"{case[0]['parameters']:,} parameters, on {machines_of(case)}.", ""]
        lines += ["| step | best | median | × | ratio, p20–p80 |", "|---|---|---|---|---|"]
        for row in case:
            if row["name"] not in COLLECTIVES:
                lines.append(
                    f"| {row['name']} | {row['best']:.2f} ms | {row['p50']:.2f} ms"
                    f" | {row['best_ratio']:.2f}× | {row['ratio_p20']:.2f}–{row['ratio_p80']:.2f} |"
                )
        worlds = " | ".join(f"{world:,} ranks, derived" for world in WORLDS)
        lines += ["", f"| all-reduce | {case[0]['ranks']} ranks, measured | {worlds} |"]
        lines += ["|---|---|" + "---|" * len(WORLDS)]
        for row in case:
            if row["name"] in COLLECTIVES:
                times = " | ".join(
                    f"{time:.2f} ms" for time in (row["best"], *derived(row).values())
                )
                lines.append(f"| {row['name'].removeprefix('all-reduce, ')} | {times} |")
        lines += [""]
    return lines
