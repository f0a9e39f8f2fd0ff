# SPDX-License-Identifier: BSD-3-Clause
"""How often attribution is right, over cases with a known truth."""

from __future__ import annotations

import torch

from attribution import scores
from preamp_bench import records
from preamp_bench.options import RESULTS, asked


def main() -> None:
    """Run the cases, print what was wrong, and append a row for each kind."""
    given = asked(
        __doc__,
        every=(1, "take each n-th case only"),
        offset=(0, "begin with this one"),
        out=(RESULTS / "attribution.jsonl", "file that gets the rows"),
    )
    for score in scores(given.every, given.offset):
        for case in score.wrong:
            print(f"wrong: {case}", flush=True)
        print(f"{score.kind}: {score.right} of {score.cases} right, {score.unknown} not known")
        row = {
            "benchmark": "attribution",
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
