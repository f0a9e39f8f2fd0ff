# SPDX-License-Identifier: BSD-3-Clause
"""The part of the page of benchmarks on kernels by back end, and on bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Collection

from preamp_bench.records import Record

Machines = Callable[[list[Record]], str]
"""Names the machines of rows."""

TEXT = """\
## Kernels by back end

One update of float32 masters from bfloat16 gradients, each rule on every back end that runs here
(`make bench BENCHES=parts`): *reference* is plain torch, one tensor after the other; `"auto"` takes
*triton* on GPUs, *jit* on CPUs with numba and *blocks* without it. **×** is the best time over the
reference's; less is faster. Two threads were to be 1.7 times as fast as one wherever a copy is.
They are not: a third of a millisecond of an update is Python of one thread, and where tensors are
larger than the caches both threads wait for the same memory.
"""

BOOKKEEPING = """\
## Bookkeeping

What a step of `FusedAdam` with clipping costs beside its kernels: its best time with the operations
left out, for each tensor. Beside it what this machine takes for one pass over a column that reads
`grad`, or the version, of every tensor: the engine makes some two dozen such passes. The aim was
2 µs on a machine where one that reads `grad` takes 0.052, so the price of 38 of them.
"""


def kernels(
    cases: Collection[list[Record]], machines_of: Callable[[list[Record]], str]
) -> list[str]:
    """Write a table for each size.

    Args:
        cases: The rows of each size.
        machines_of: Names the machines of rows.

    Returns:
        Lines of Markdown.
    """
    lines: list[str] = []
    for case in cases:
        names = list(dict.fromkeys(row["name"] for row in case))
        size = f"{case[0]['parameters']:,} parameters in {case[0]['tensors']:,} tensors"
        lines += [f"{size}, on {machines_of(case)}:", ""]
        lines += [f"| rule | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
        for rule in dict.fromkeys(row["group"] for row in case):
            cells = {row["name"]: row for row in case if row["group"] == rule}
            lines.append(f"| {rule} | " + " | ".join(_cell(cells[name]) for name in names) + " |")
        lines.append("")
    return lines


def _cell(row: Record) -> str:
    if row["name"].startswith("copy"):
        return f"{row['copied'] * 8 / row['best'] / 1e6:.1f} GB/s"
    return f"{row['best']:.2f} ms · {row['best_ratio']:.2f}×"


def bookkeeping(cases: Collection[list[Record]], machines_of: Machines) -> list[str]:
    """Write one table.

    Args:
        cases: The rows of each level and number of tensors.
        machines_of: Names the machines of rows.

    Returns:
        Lines of Markdown.
    """
    lines = [f"Measured on {machines_of([row for case in cases for row in case])}.", ""]
    lines += ["| step | tensors | each | pass: grad | pass: version | of a pass |"]
    lines += ["|---|---|---|---|---|---|"]
    for case in cases:
        *passes, step = (row["each"] for row in case)
        times = " | ".join(f"{each / 1e3:.2f} µs" for each in (step, *passes))
        name, tensors, share = case[-1]["name"], case[0]["tensors"], step / passes[0]
        lines.append(f"| {name} | {tensors:,} | {times} | {share:.0f}× |")
    return [*lines, ""]
