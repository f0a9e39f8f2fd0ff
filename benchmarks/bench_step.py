# SPDX-License-Identifier: BSD-3-Clause
"""Time the update of a step, the rows appended to ``benchmarks/results/step.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

from preamp_bench.commands import bench

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    bench(["step", "--out", str(RESULTS / "step.jsonl"), *sys.argv[1:]])
