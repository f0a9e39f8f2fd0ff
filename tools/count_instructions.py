# SPDX-License-Identifier: BSD-3-Clause
"""Count the instructions that a step of FusedAdam with clipping costs the host, door by door.

    python tools/count_instructions.py [--levels O5,O2,O1] [--sizes 148,300,1000]

Needs valgrind and a C compiler, and counts on the pretended device of ``tests/devices``, whose
kernels are not run. Unlike times, the numbers are the same on a machine that is busy. Printed are,
for each level and number of tensors, the instructions of all doors of one steady step, and from the
first and last size what a tensor costs, and what a step costs without any.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SWITCH = """#include <valgrind/callgrind.h>
void on(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void off(const char* door) { CALLGRIND_DUMP_STATS_AT(door); CALLGRIND_STOP_INSTRUMENTATION; }
"""
DOORS = ("begins", "ends", "clip", "step", "zero_grad")


def doors(level: str, count: int) -> Iterator[Iterator[str]]:
    """Steps without end; each yields before and after every door, ``""`` where nothing counts."""
    import devices.pretended.plugin as pretended  # pyright: ignore[reportMissingImports]

    pretended.pytest_configure()
    vars(pretended)["_in_triton"][0] = True
    import torch

    import preamp
    from preamp.kernels.triton import launch, ops, reductions, works
    from preamp.optimizers import FusedAdam

    for module in (launch, ops, reductions, works):
        vars(module)["launch"] = lambda *_, **__: None
    model: Any = torch.nn.ParameterList([torch.zeros(2) for _ in range(count)]).cuda()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    params = list(model.parameters())
    pools = [[torch.zeros_like(p) for p in params] for _ in range(2)]

    def step(number: int) -> Iterator[str]:
        loss = params[0].float().sum() * 0
        yield ""
        block = preamp.scale_loss(loss, optimizer)
        block.__enter__()
        yield "begins"
        for param, grad in zip(params, pools[number % 2], strict=True):
            param.grad = grad
        yield ""
        block.__exit__(None, None, None)
        yield "ends"
        preamp.clip_grad_norm_(optimizer, 1.0)
        yield "clip"
        optimizer.step()
        yield "step"
        optimizer.zero_grad()
        yield "zero_grad"

    number = 0
    while True:
        yield step(number)
        number += 1


def measure(level: str, count: int, switch: Path) -> None:
    """Run in valgrind: six steps, and one that is counted."""
    callgrind: Any = ctypes.CDLL(str(switch))
    steps = doors(level, count)
    for _ in range(6):
        list(next(steps))
    gc.collect()
    gc.disable()
    step = next(steps)
    while True:
        callgrind.on()
        door = next(step, None)
        callgrind.off((door or "nothing").encode())
        if door is None:
            return


def counted(level: str, count: int, folder: Path) -> dict[str, int]:
    """Instructions of each door."""
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "-q"]
    command += [f"--callgrind-out-file={folder}/{level}-{count}", sys.executable, __file__]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = [*command, "--inside", level, str(count), str(folder / "switch.so")]
    subprocess.run(run, check=True, env=environ)
    found: dict[str, int] = {}
    for path in folder.glob(f"{level}-{count}.*"):
        text = path.read_text()
        door = re.search(r"^desc: Trigger: Client Request: (\w+)$", text, re.M)
        if door and door[1] in DOORS:
            found[door[1]] = int(re.findall(r"^(?:totals|summary): (\d+)", text, re.M)[-1])
    return found


def main() -> None:
    """Count, or be counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--levels", default="O5,O2,O1")
    parser.add_argument("--sizes", default="148,300,1000")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        level, count, switch = given.inside
        return measure(level, int(count), Path(switch))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "switch.c").write_text(SWITCH)
        made = ["cc", "-shared", "-fPIC", "-O1", "-o", folder / "switch.so", folder / "switch.c"]
        subprocess.run(made, check=True)
        print("level  tensors", *[f"{door:>11}" for door in (*DOORS, "sum")])
        sizes = sorted(map(int, given.sizes.split(",")))
        for level in given.levels.split(","):
            rows = [counted(level, size, folder) for size in sizes]
            for size, row in zip(sizes, rows, strict=True):
                show(level, str(size), row)
            if len(sizes) > 1:
                between = sizes[-1] - sizes[0]
                each = {door: (rows[-1][door] - rows[0][door]) // between for door in DOORS}
                show(level, "a tensor", each)
                show(level, "a step", {d: rows[0][d] - each[d] * sizes[0] for d in DOORS})


def show(level: str, what: str, row: dict[str, int]) -> None:
    """Print a line of the table."""
    numbers = [*[row[door] for door in DOORS], sum(row.values())]
    print(f"{level:>5} {what:>8}", *[f"{number:>11,}" for number in numbers], flush=True)


if __name__ == "__main__":
    main()
