# SPDX-License-Identifier: BSD-3-Clause
"""Run ``examples/00_demo.py`` as ``make demo`` does, and keep a row for README's first table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from preamp_bench import records
from preamp_bench.options import RESULTS, asked

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and append a row."""
    threads = torch.get_num_threads()  # those of the demo, which is a process of its own
    given = asked(
        __doc__,
        arguments,
        steps=(120, "of each level"),
        out=(RESULTS / "demo.jsonl", "file that gets the row"),
    )
    facts = {**records.provenance(torch.device("cpu")), "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        demo = [sys.executable, str(ROOT / "examples" / "00_demo.py"), "--device=cpu"]
        demo += [f"--steps={given.steps}", f"--picture={folder}/demo.svg", f"--json={results}"]
        subprocess.run(demo, check=True)
        levels = json.loads(results.read_text(encoding="utf-8"))
    for found in levels.values():
        del found["losses"]
    row = {"benchmark": "demo", "name": "demo", "group": "demo", "status": "measured", **facts}
    records.append(given.out, [{**row, "steps": given.steps, "levels": levels}])


if __name__ == "__main__":
    main()
