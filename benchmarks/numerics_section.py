# SPDX-License-Identifier: BSD-3-Clause
"""The part of the page of benchmarks on what statistics cost."""

from __future__ import annotations

from collections.abc import Callable, Collection

from preamp_bench.records import Record

TEXT = """\
## Statistics

What `numerics="light"` and `"full"` cost a step of the demo's GPT (forward, backward, clipping,
preamp's `FusedAdam`), with a history on disk (`python benchmarks/bench_numerics.py`). One engine
trains all variants in turns. **Recorder** is the median time inside preamp's code for it, at a step
that is measured and at one between; with `numerics="off"` it is what an engine with nothing to
record spends on finding that out. **Overhead** is the mean of that time over an interval of 100
steps, one of them measured, beyond the time with `"off"`, over the shortest step of all. In
brackets: the same taken from the best times of whole steps, which on a busy machine vary by more
than what is to be measured. **modules** is a step in which `watch_activations` reads inputs,
outputs and gradients of all modules, **trace** one in which they are watched for an overflow: in
brackets the factor over the best step with `"off"`.
"""


def table(cases: Collection[list[Record]], machines_of: Callable[[list[Record]], str]) -> list[str]:
    """Write the measured rows.

    Args:
        cases: The rows of each level.
        machines_of: Names the machines of rows.

    Returns:
        Lines of Markdown.
    """
    lines = [f"Measured on {machines_of([row for case in cases for row in case])}.", ""]
    lines += ["| level | batch | tensors, parameters | numerics | step | recorder: between"]
    lines[-1] += " | measured | overhead |"
    lines += ["|---|---|---|---|---|---|---|---|"]
    for case in cases:
        row = {row["name"]: row for row in case}
        off = row["off"]
        head = f"| {off['level']} | {off['batch']} | {off['tensors']}, {off['parameters']:,}"
        lines.append(f"{head} | off | {_ms(off['best'])} | {_ms(off['inside'])} | | |")
        for way in ("light", "full"):
            between, measured = row[f"{way}, between"], row[f"{way}, measuring"]
            lines.append(
                f"{head} | {way} | {_ms(between['best'])} | {_ms(between['inside'])}"
                f" | {_ms(measured['inside'])} | {measured['overhead']:.2%}"
                f" ({measured['overhead_of_whole_steps']:.1%}) |"
            )
        for way in ("modules", "trace"):
            if way in row:  # older rows have none
                factor = row[way]["best"] / off["best"]
                lines.append(f"{head} | {way} | {_ms(row[way]['best'])} | | | (×{factor:.2f}) |")
    return [*lines, ""]


def _ms(value: float) -> str:
    return f"{value:.2f} ms"
