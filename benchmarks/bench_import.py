# SPDX-License-Identifier: BSD-3-Clause
"""Time that ``import preamp`` takes beyond ``import torch``, by ``python -X importtime``.

Each repeat is a new process; the row keeps the shortest time and the spread of all.
"""

from __future__ import annotations

import re
import subprocess
import sys

import torch

from preamp_bench import records
from preamp_bench.options import RESULTS, asked

PROGRAM = "import torch; import preamp"
TOTAL = re.compile(r"\|\s*(\d+) \| preamp$", re.MULTILINE)


def milliseconds() -> float:
    """Cumulative import time of ``preamp`` in a new process, torch imported before."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
    )
    found = TOTAL.search(done.stderr)
    if found is None:
        raise RuntimeError(f"no line for preamp in the output of -X importtime:\n{done.stderr}")
    return int(found[1]) / 1000


def main() -> None:
    """Measure, print, and append a row."""
    out = RESULTS / "import.jsonl"
    given = asked(__doc__, repeats=(15, "processes"), out=(out, "file that gets the row"))
    times = sorted(milliseconds() for _ in range(given.repeats))
    row = {
        "benchmark": "import",
        **records.provenance(torch.device("cpu")),
        "best": times[0],
        "p50": times[len(times) // 2],
        "worst": times[-1],
        "rounds": given.repeats,
    }
    records.append(given.out, [row])
    print(f"import preamp: best {row['best']:.0f} ms, median {row['p50']:.0f} ms")


if __name__ == "__main__":
    main()
