# SPDX-License-Identifier: BSD-3-Clause
"""Time steps on several ranks, the rows appended to ``benchmarks/results/distributed.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

from preamp_bench.commands import bench

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    bench(["distributed", "--out", str(RESULTS / "distributed.jsonl"), *sys.argv[1:]])
