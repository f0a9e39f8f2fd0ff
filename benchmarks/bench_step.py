# SPDX-License-Identifier: BSD-3-Clause
"""``preamp bench step`` with the rows appended to ``benchmarks/results/step.jsonl``."""

from __future__ import annotations

import sys
from pathlib import Path

from preamp.cli.app import app

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    app(["bench", "step", "--out", str(RESULTS / "step.jsonl"), *sys.argv[1:]])
