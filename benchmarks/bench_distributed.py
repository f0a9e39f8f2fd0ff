# SPDX-License-Identifier: BSD-3-Clause
"""``preamp bench distributed``, rows appended to ``benchmarks/results/distributed.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

from preamp.cli.app import app

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    app(["bench", "distributed", "--out", str(RESULTS / "distributed.jsonl"), *sys.argv[1:]])
