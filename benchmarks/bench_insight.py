# SPDX-License-Identifier: BSD-3-Clause
"""How often attribution, doctor, planner and report are right, over cases with a known truth."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch

from preamp_bench import records

TOOLS = ("attribution", "doctor", "plan", "report")


def main() -> None:
    """Run the cases, print what was wrong, and append a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="Any of these, by commas.")
    parser.add_argument("--every", type=int, default=1, help="Take each n-th case only.")
    parser.add_argument("--offset", type=int, default=0, help="Begin with this one.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/insight.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tool in given.tools.split(","):
        if tool not in TOOLS:
            parser.error(f"--tools got {tool!r}; choose from {', '.join(TOOLS)}")
        for score in importlib.import_module(f"insight.{tool}").scores(given.every, given.offset):
            for case in score.wrong:
                print(f"wrong: {case}", flush=True)
            print(f"{score.kind}: {score.right} of {score.cases} right, {score.unknown} not known")
            row = {
                "benchmark": "insight",
                **records.provenance(torch.device("cpu")),
                "kind": score.kind,
                "cases": score.cases,
                "right": score.right,
                "unknown": score.unknown,
                "wrong": score.wrong,
                "every": given.every,
            }
            records.append(given.out, [row])


if __name__ == "__main__":
    main()
