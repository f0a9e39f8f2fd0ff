# SPDX-License-Identifier: BSD-3-Clause
"""Kill a process at random moments while it saves checkpoints, and load the newest every time.

    python tools/kill_saves.py --kills 500

A child saves without pause, in turn one file again and again, a series of which it keeps two, and
in the background. It reports each file that is on the disk by a line in a pipe. After the kill the
newest file must load, hold what was saved under its number, and be no older than the last report.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import preamp
from preamp.checkpoint import latest_checkpoint

LONGEST_WAIT = 0.25  # seconds of saving before the kill, at most, after
MOST_FILES = 3  # so many files: a slow machine may take longer for each
SIZE = 60_000


def content(number: int) -> dict[str, Any]:
    """What file ``number`` holds."""
    return {"number": number, "values": torch.full((SIZE,), float(number))}


def save_forever(folder: Path, number: int, pipe: int) -> None:
    """Save until killed."""
    suffix = (".pt", ".safetensors")[number % 2]
    way = number % 3
    os.write(pipe, b"start\n")
    while True:
        number += 1
        name = f"step_{number}{suffix}" if way else f"only{suffix}"
        saving = preamp.save_checkpoint(
            folder / name,
            extra=content(number),
            keep_last=2 if way else None,
            asynchronous=way == 2,
        )
        saving.wait()
        os.write(pipe, f"{number}\n".encode())


def kill_once(folder: Path, number: int, files: int, wait: float) -> int:
    """Start a child, kill it ``wait`` seconds after it has saved ``files``; return the last one."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_forever(folder, number, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as reports:
        lines = [reports.readline() for _ in range(1 + files)]  # the first tells of the start
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        lines += reports.readlines()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("the child stopped by itself")
    return max(map(int, lines[1:]), default=number)


def check(folder: Path, reported: int) -> int:
    """Load the newest file and check it; return its number."""
    path = latest_checkpoint(folder)
    if path is None:
        if reported:
            raise SystemExit(f"no file can be loaded, and {reported} was reported")
        return 0
    extra = preamp.load_checkpoint(path)
    number = extra["number"]
    if not torch.equal(extra["values"], content(number)["values"]):
        raise SystemExit(f"{path} holds other values than those of {number}")
    if number < reported:
        raise SystemExit(f"the newest file is {number}, and {reported} was reported")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the given number of kills; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    number, drafts = 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.kills):
            files, wait = generator.randint(0, MOST_FILES), generator.uniform(0, LONGEST_WAIT)
            reported = kill_once(folder, number, files, wait)
            drafts += any(folder.glob(".*.part"))
            number = check(folder, reported)
    print(f"{options.kills} kills, {drafts} times with an unfinished file, {number} files saved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
