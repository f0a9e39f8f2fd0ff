# SPDX-License-Identifier: BSD-3-Clause
"""Time the optimizer's side of a step: check, unscale, clip, AdamW, round.

One process; all variants of a comparison take turns. Memory that a step frees stays for the next
one (see `KEEP_MEMORY`), so the program starts itself once more with glibc told so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from preamp.core.dtypes import dtype_name
from preamp_bench import records, step
from preamp_bench.harness import Effort
from preamp_bench.options import RESULTS, asked, choose_device, chosen, numbers, refusing, show
from preamp_bench.worker import KEEP_MEMORY

CLIPS = {"yes": (True,), "no": (False,), "both": (True, False)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and append rows."""
    given = asked(
        __doc__,
        arguments,
        params=("1e6,1e7", "numbers of parameters"),
        tensors=("10,1000,10000", "numbers of tensors"),
        clips=("yes", "clip the norm: yes, no, or both"),
        threads=(1, "how many torch and the kernels take"),
        seconds=(6.0, "for each comparison; a few rounds always run"),
        device=("auto", "auto (cuda where there is one), cpu, cuda, ..."),
        out=(RESULTS / "step.jsonl", "file that gets the rows"),
    )
    with refusing():
        counts, sizes = numbers(given.params), numbers(given.tensors)
        clips = CLIPS[chosen(given.clips, CLIPS, "--clips")[0]]
        cases = step.grid(counts, sizes, clips, choose_device(given.device))
    for case in cases:
        rows = step.run_case(case, Effort(seconds=given.seconds), given.threads)
        size = f"{case.parameters:,} parameters in {case.tensors:,} tensors"
        show(f"{size}, {dtype_name(case.half)}, {'no ' * (not case.clip)}clipping", rows)
        records.append(given.out, rows)


if __name__ == "__main__":
    if not os.environ.keys() >= KEEP_MEMORY.keys():  # glibc reads them when a process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    main()
