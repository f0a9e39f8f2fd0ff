# SPDX-License-Identifier: BSD-3-Clause
"""What attacks and soaks share: processes that report lines, and a row of results."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from preamp_bench.options import RESULTS as RESULTS
from preamp_bench.options import asked as asked
from preamp_bench.records import append, provenance

Report = Callable[[str], None]
"""Writes a line to the process that has made the fork."""


class Forks:
    """Forks of this process. `lines` are those that they report, in the order of their coming."""

    def __init__(self, work: Callable[[int, Report], object], count: int = 1) -> None:
        """Let each fork do ``work(number, report)``; its exit status is 0, or 1 if that raises."""
        sys.stdout.flush()
        self._pids: list[int] = []
        self._pipes: list[int] = []
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
                for key, _ in ready.select():
                    if data := os.read(key.fd, 1 << 16):
                        *whole, parts[key.fd] = (parts[key.fd] + data).split(b"\n")
                        yield from (line.decode(errors="replace") for line in whole)
                    else:
                        ready.unregister(key.fd)
                        os.close(key.fd)

    def kill(self) -> None:
        """Stop all at once."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> tuple[list[str], list[int]]:
        """Wait for all to end; return the lines that nobody has read yet, and the exit statuses."""
        rest = list(self.lines)  # or they could write no more
        return rest, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]


def _be_fork(work: Callable[[int, Report], object], number: int, pipe: int) -> NoReturn:
    def report(line: str) -> None:
        one_line = line.replace("\n", " ")
        left = f"{one_line}\n".encode("utf-8", "backslashreplace")
        while left:  # a signal may stop a write half-way
            left = left[os.write(pipe, left) :]

    status = 1
    try:
        work(number, report)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def keep(file: Path, benchmark: str, row: dict[str, Any]) -> None:
    """Append what was measured to a file of results, with where it was."""
    where = {"benchmark": benchmark, "status": "measured", **provenance(torch.device("cpu"))}
    append(file, [{**row, **where}])
