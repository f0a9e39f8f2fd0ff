# SPDX-License-Identifier: BSD-3-Clause
"""Compile what the tests take of the kernels for CPUs, so that tests load it from ``PREAMP_CACHE``.

Each process of a test run would compile what no other has yet: two at once do the same work twice.
The machine code lies in the folder as long as the sources of the kernels stay as they are.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cases.rules import ONE_EACH, RuleRow
from cases.stored import STORAGES, Case
from preamp.kernels import Update, backend
from preamp.kernels.jit import loops
from preamp.kernels.jit.compiler import cache_folder

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = (loops.update, loops.measure_directions, loops.combine, loops.sum_squares)
JIT = backend("jit")


def update_plain(row: RuleRow) -> None:
    """Of lists as torch keeps them."""
    params, grads, *state = ([torch.ones(3)] for _ in range(2 + row.states))
    if row.rule.has_numbers:
        state[-1] = [torch.tensor(0.5)]
    JIT.update_(params, grads, *state, rule=row.rule, update=Update(step=2))


def compile_all() -> None:
    """Call what is compiled once for each type."""
    for dtype in DTYPES:
        JIT.census([torch.ones(3, dtype=dtype)], CPU, with_norm=True)
    for x, y in itertools.product(DTYPES, (None, *DTYPES)):
        JIT.axpby_([torch.ones(3)], 2.0, [torch.ones(3, dtype=x)], 1.0,
                   [None if y is None else torch.ones(3, dtype=y)])  # fmt: skip
    for row in ONE_EACH:
        update_plain(row)
        for half, kind in STORAGES:
            Case.of(row, half, kind).run(JIT)


def main() -> None:
    """Compile, and say how much there was to do."""
    began = time.monotonic()
    compile_all()
    made = sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)
    there = sum(sum(kernel.stats.cache_hits.values()) for kernel in KERNELS)
    seconds = time.monotonic() - began
    print(f"{made} kernels compiled, {there} were there, {seconds:.0f} s, in {cache_folder()}")


if __name__ == "__main__":
    main()
