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

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import preamp
from attack_frame import TOLD, Forks, Report, asked, meet
from preamp.checkpoint import latest_checkpoint

LONGEST_WAIT = 0.25  # seconds of saving before the kill, at most, after
MOST_FILES = 3  # so many files: a slow machine may take longer for each
GROUP_SECONDS = 20  # until torch gives up on a rank
# Until this program gives up on all, which says that they hang. Those that do not hang end by
# torch's limit, on a busy machine each collective by its own. Only a hang costs so long a wait.
HANG_SECONDS = 900
MOST_KILLS = 200  # until one has hit an unfinished file
SIZE = 60_000


def content(number: int, mesh: Any = None) -> dict[str, Any]:
    """What checkpoint ``number`` holds; this rank's part of it where there is a mesh of ranks."""
    values = torch.full((SIZE,), float(number))
    if mesh is not None:
        own = values.chunk(mesh.size())[mesh.get_rank()]
        values = DTensor.from_local(own, mesh, [Shard(0)], shape=(SIZE,), stride=(1,))
    return {"number": number, "values": values}


def save_forever(folder: Path, number: int, report: Report, mesh: Any) -> NoReturn:
    """Save until killed."""
    suffix = (".pt", ".safetensors")[number % 2]
    way = number % 3
    report("start")
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
        report(str(number))


def kill_once(folder: Path, number: int, ranks: int, draw: random.Random) -> int:
    """Start children, kill one or all while they save; return the last number reported."""
    files, wait = draw.randint(0, MOST_FILES), draw.uniform(0, LONGEST_WAIT)
    with tempfile.TemporaryDirectory() as meeting:

        def work(rank: int, report: Report) -> int:
            mesh = None
            try:
                meet(rank, ranks, f"{meeting}/meet", GROUP_SECONDS)
                if ranks > 1:
                    mesh = init_device_mesh("cpu", (ranks,))
                    dist.barrier()
                save_forever(folder, number, report, mesh)
            except preamp.PreampError:
                return TOLD

        children = Forks(work, ranks)
        # The first line of each child tells of the start.
        lines = [next(children.lines, "") for _ in range(ranks * (1 + files))]
        time.sleep(wait)
        children.kill(draw)
        lines += children.wait_after_kill(HANG_SECONDS, may_finish=False)
    told = (line.strip() for line in lines)
    return max((int(line) for line in told if line.isdigit()), default=number)


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
    options = asked(
        __doc__,
        arguments,
        kills=(100, "how many, at least"),
        ranks=(1, "processes that save together"),
        seed=(0, "what the moments are drawn from"),
    )
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
