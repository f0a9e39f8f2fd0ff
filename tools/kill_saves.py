# SPDX-License-Identifier: BSD-3-Clause
"""Kill processes at random moments while they save checkpoints, and load the newest every time.

    python tools/kill_saves.py --kills 500
    python tools/kill_saves.py --kills 200 --ranks 2

It goes on after so many kills until one of them has hit an unfinished file. A child saves without
pause, in turn one checkpoint again and again, a series of which it keeps two, and in the
background. It reports each that is on the disk by a line in a pipe. After the kill the newest one
must load, hold what was saved under its number, and be no older than the last report.

With ``--ranks`` there are several children, each of which saves its part of one tensor, and either
one of them is killed or all. Those that are left must raise, and not wait for ever.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import preamp
from preamp.checkpoint import latest_checkpoint

LONGEST_WAIT = 0.25  # seconds of saving before the kill, at most, after
MOST_FILES = 3  # so many files: a slow machine may take longer for each
GROUP_SECONDS, HANG_SECONDS = 20, 60  # until torch gives up on a rank, until this program does
MOST_KILLS = 200  # until one has hit an unfinished file
SIZE = 60_000
TOLD = 3  # exit status of a rank that has raised because another one is gone


def content(number: int, mesh: Any = None) -> dict[str, Any]:
    """What checkpoint ``number`` holds; this rank's part of it where there is a mesh of ranks."""
    values = torch.full((SIZE,), float(number))
    if mesh is not None:
        own = values.chunk(mesh.size())[mesh.get_rank()]
        values = DTensor.from_local(own, mesh, [Shard(0)], shape=(SIZE,), stride=(1,))
    return {"number": number, "values": values}


def save_forever(folder: Path, number: int, pipe: int, mesh: Any) -> NoReturn:
    """Save until killed."""
    suffix = (".pt", ".safetensors")[number % 2]
    way = number % 3
    os.write(pipe, b"start\n")
    while True:
        number += 1
        name = f"step_{number}{suffix}" if way else f"only{suffix}"
        saving = preamp.save_checkpoint(
            folder / name,
            extra=content(number, mesh),
            keep_last=2 if way else None,
            asynchronous=way == 2,
        )
        saving.wait()
        os.write(pipe, f"{number}\n".encode())


def be_child(folder: Path, number: int, pipe: int, place: tuple[int, int, str]) -> NoReturn:
    """Run in a process of its own; ``place`` is its rank, of how many, and where they meet."""
    rank, ranks, meet = place
    try:
        mesh = None
        if ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meet}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=GROUP_SECONDS),
            )
            mesh = init_device_mesh("cpu", (ranks,))
            dist.barrier()
        save_forever(folder, number, pipe, mesh)
    except preamp.PreampError:
        os._exit(TOLD)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_once(folder: Path, number: int, ranks: int, generator: random.Random) -> int:
    """Start children, kill one or all while they save; return the last number reported."""
    files, wait = generator.randint(0, MOST_FILES), generator.uniform(0, LONGEST_WAIT)
    ours, theirs = os.pipe()
    children: list[int] = []
    with tempfile.TemporaryDirectory() as meet, os.fdopen(ours) as reports:
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                be_child(folder, number, theirs, (rank, ranks, f"{meet}/meet"))
            children.append(child)
        os.close(theirs)
        # The first line of each child tells of the start.
        lines = [reports.readline() for _ in range(ranks * (1 + files))]
        time.sleep(wait)
        victims = children if generator.random() < 0.5 else [generator.choice(children)]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        wait_for(children, victims)
        told = (line.strip() for line in [*lines, *reports.readlines()])
        return max((int(line) for line in told if line.isdigit()), default=number)


def wait_for(children: Sequence[int], victims: Sequence[int]) -> None:
    """Wait until all have ended, those that were not killed by raising."""
    deadline = time.monotonic() + HANG_SECONDS
    for child in children:
        wanted = -signal.SIGKILL if child in victims else TOLD
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            for one in children:
                os.kill(one, signal.SIGKILL)
            raise SystemExit("a rank waits for one that was killed")
        if os.waitstatus_to_exitcode(status) != wanted:
            raise SystemExit(f"a child ended with {os.waitstatus_to_exitcode(status)}")


def check(folder: Path, reported: int) -> int:
    """Load the newest checkpoint and check it; return its number."""
    path = latest_checkpoint(folder)
    if path is None:
        if reported:
            raise SystemExit(f"no checkpoint can be loaded, and {reported} was reported")
        return 0
    extra = preamp.load_checkpoint(path)
    number = extra["number"]
    if not torch.equal(extra["values"], content(number)["values"]):
        raise SystemExit(f"{path} holds other values than those of {number}")
    if number < reported:
        raise SystemExit(f"the newest one is {number}, and {reported} was reported")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the given number of kills; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    number, kills, drafts = 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while kills < options.kills or (not drafts and kills < MOST_KILLS):
            kills += 1
            reported = kill_once(folder, number, options.ranks, generator)
            drafts += any(folder.rglob(".*.part"))
            number = check(folder, reported)
    print(f"{kills} kills, {drafts} times with an unfinished file, {number} files saved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
