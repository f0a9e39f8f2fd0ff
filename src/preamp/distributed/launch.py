# SPDX-License-Identifier: BSD-3-Clause
"""Start one process per device: ``python -m preamp.parallel.multiproc script.py arguments``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from preamp.core.errors import bad_value

_FLAG = "--world-size"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script once per rank and wait for all of them.

    Each process gets the arguments given here (the command line's by default), then ``--world-size
    N`` if it was not among them, then ``--rank i``. N is the number of accelerators, 1 where there
    is none. Rank 0 writes to this standard output, rank i to the file ``GPU_{i}.log`` in the
    working directory.

    Returns 0 if every process succeeded. Otherwise the exit code of the first one that failed (128
    plus the number of the signal that killed it), after the others were stopped: they would wait
    for it for ever. 2 if the arguments cannot be used.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        world_size = read_world_size(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if world_size is None:
        world_size = max(torch.accelerator.device_count(), 1)
        arguments += [_FLAG, str(world_size)]
    with ExitStack() as stack:
        return _wait([_start(arguments, rank, stack) for rank in range(world_size)])


def read_world_size(arguments: Sequence[str]) -> int | None:
    """The number that follows ``--world-size``, or ``None`` without the flag."""
    if not arguments:
        raise bad_value(
            "No script was given",
            "Allowed is a script followed by its arguments",
            "Call python -m preamp.parallel.multiproc script.py",
        )
    for index, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag != _FLAG:
            continue
        text = value or next(iter(arguments[index + 1 :]), "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
        raise bad_value(
            f"{_FLAG} {text} cannot be used",
            "Allowed is a whole number from 1",
            f"Pass {_FLAG} 2 for two processes, or leave it out for one per device",
        )
    return None


def _start(arguments: Sequence[str], rank: int, stack: ExitStack) -> subprocess.Popen[Any]:
    log = None if rank == 0 else stack.enter_context(open(f"GPU_{rank}.log", "w"))
    command = [sys.executable, *arguments, "--rank", str(rank)]
    process = subprocess.Popen(command, stdout=log)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()  # does nothing to one that has ended
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[Any]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_SECONDS)
