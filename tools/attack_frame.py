# SPDX-License-Identifier: BSD-3-Clause
"""What attacks and soaks share: processes that report lines, and a row of results."""

from __future__ import annotations

import math
import os
import random
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from preamp_bench.options import RESULTS as RESULTS
from preamp_bench.options import asked as asked
from preamp_bench.records import append, provenance

TOLD = 3
"""Exit status of a process that has ended because another one was gone, and says so."""

Report = Callable[[str], None]
"""Writes a line to the process that has made the fork."""


class Forks:
    """Forks of this process. `lines` are those that they report, in the order of their coming."""

    def __init__(self, work: Callable[[int, Report], int | None], count: int = 1) -> None:
        """Let each fork do ``work(number, report)``, whose result is its exit status."""
        sys.stdout.flush()
        self._pids: list[int] = []
        self._killed: list[int] = []
        self._pipes: list[int] = []
        self._end = math.inf  # when all are killed, since they do not end
        for number in range(count):
            # One for each, so that no line is ever cut by another's, however long it is.
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_fork(work, number, writing)
            os.close(writing)
            self._pids.append(pid)
            self._pipes.append(reading)
        self.lines = self._read()

    def _read(self) -> Iterator[str]:
        """Yield whole lines until all have ended; what one was killed in is none."""
        parts = dict.fromkeys(self._pipes, b"")
        with selectors.DefaultSelector() as ready:
            for pipe in parts:
                ready.register(pipe, selectors.EVENT_READ)
            while ready.get_map():
                left = self._end - time.monotonic()
                for key, _ in ready.select(None if left == math.inf else max(left, 0)):
                    if data := os.read(key.fd, 1 << 16):
                        *whole, parts[key.fd] = (parts[key.fd] + data).split(b"\n")
                        yield from (line.decode(errors="replace") for line in whole)
                    else:
                        ready.unregister(key.fd)
                        os.close(key.fd)
                if time.monotonic() > self._end:
                    self._kill(self._pids)  # none of them is waited for yet, so all numbers hold
                    self._end = math.inf

    def _kill(self, pids: list[int]) -> None:
        self._killed = pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill(self, draw: random.Random) -> None:
        """Stop all at once, or one of them."""
        self._kill(self._pids if draw.random() < 0.5 else [draw.choice(self._pids)])

    def wait(self, seconds: float = math.inf) -> tuple[list[str], list[int]]:
        """Wait for all to end; return the lines that nobody has read yet, and the exit statuses.

        Raises:
            SystemExit: They have not ended after so long. All are killed then.
        """
        self._end = end = time.monotonic() + seconds
        rest = list(self.lines)  # or they could write no more
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        if self._end != end:
            raise SystemExit("a process waits for one that was killed")
        return rest, codes

    def wait_after_kill(self, seconds: float = math.inf, *, may_finish: bool) -> list[str]:
        """`wait`; those that were not killed have to tell that another one was.

        Where they ``may_finish``, each may also have been done before. Returns the lines.

        Raises:
            SystemExit: One has ended in another way, or not at all.
        """
        rest, codes = self.wait(seconds)
        if may_finish:
            allowed = {0, -signal.SIGKILL, TOLD} if self._killed else {0}
            is_right = allowed.issuperset(codes)
        else:
            killed = (pid in self._killed for pid in self._pids)
            is_right = codes == [-signal.SIGKILL if one else TOLD for one in killed]
        if not is_right:
            raise SystemExit(f"processes ended with {codes}")
        return rest


def _be_fork(work: Callable[[int, Report], int | None], number: int, pipe: int) -> NoReturn:
    def report(line: str) -> None:
        one_line = line.replace("\n", " ")
        left = f"{one_line}\n".encode("utf-8", "backslashreplace")
        while left:  # a signal may stop a write half-way
            left = left[os.write(pipe, left) :]

    status = 1
    try:
        status = work(number, report) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def meet(rank: int, ranks: int, place: str, seconds: float) -> None:
    """Join the other ranks, if there are any, at a file that does not exist yet."""
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )


def keep(file: Path, benchmark: str, rows: Iterable[dict[str, Any]]) -> None:
    """Append what was measured to a file of results, with where it was."""
    where = {"benchmark": benchmark, "status": "measured", **provenance(torch.device("cpu"))}
    append(file, [{**row, **where} for row in rows])
