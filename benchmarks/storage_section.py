# SPDX-License-Identifier: BSD-3-Clause
"""The part of the page of benchmarks on what less memory costs in quality."""

from __future__ import annotations

from collections.abc import Callable, Collection
from statistics import mean, stdev

from preamp_bench.records import Record

TEXT = """\
## Storage and quality

Small models trained in every [storage](storage.md), and by optimizers of other packages on bfloat16
weights, from the same weights on the same batches (`python benchmarks/bench_storage.py`): the
demo's GPT, two layers of width 128, on the standard library's source text, and a convolutional
network on scikit-learn's digits. Scores are those of held-out data, means over the seeds, and less
is better. **To float32** is the difference to float32 of the same seed, mean ± standard deviation;
the first row has the standard deviation of the scores themselves, which is what another seed
changes. **B/param** are weights, masters, gradients and optimizer state between backward and step,
counted from the tensors.
"""


def table(rows: Collection[Record], machines_of: Callable[[list[Record]], str]) -> list[str]:
    """Write the measured rows of each task.

    Args:
        rows: The latest row of each way to train.
        machines_of: Names the machines of rows.

    Returns:
        Lines of Markdown.
    """
    lines = [f"Measured on {machines_of(list(rows))}.", ""]
    for task in dict.fromkeys(row["task"] for row in rows):
        chosen = [row for row in rows if row["task"] == task]
        base = next((row["scores"] for row in chosen if row["name"] == "float32"), None)
        scores = [name for name in (base or {}) if name != "bytes per parameter"]
        lines += [f"### {task}, {chosen[0]['steps']} steps, {chosen[0]['seeds']} seeds", ""]
        lines += ["| | " + " | ".join(f"{name} | to float32" for name in scores) + " | B/param |"]
        lines += ["|---|" + "---|---|" * len(scores) + "---|"]
        for row in chosen:
            if row["status"] != "measured" or base is None:
                lines += [f"| {row['name']} | not measured" + " |" * (2 * len(scores) + 1)]
                continue
            held = mean(row["scores"]["bytes per parameter"])
            cells = [_cells(row, base, name) for name in scores]
            lines += [f"| {row['name']} | " + " | ".join(cells) + f" | {held:.2f} |"]
        lines += [""]
    return lines


def _cells(row: Record, base: dict[str, list[float]], name: str) -> str:
    own = row["scores"][name]
    if row["name"] == "float32":
        return f"{mean(own):.4f} | ± {stdev(own):.4f}"
    apart = [a - b for a, b in zip(own, base[name], strict=True)]
    return f"{mean(own):.4f} | {mean(apart):+.4f} ± {stdev(apart):.4f}"
