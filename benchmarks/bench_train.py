# SPDX-License-Identifier: BSD-3-Clause
"""Time whole training steps, the rows appended to ``benchmarks/results/train.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

from preamp_bench.commands import bench

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    bench(["train", "--out", str(RESULTS / "train.jsonl"), *sys.argv[1:]])
