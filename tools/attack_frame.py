# SPDX-License-Identifier: BSD-3-Clause
"""What attacks and soaks share: processes that report lines, a command line, a row of results."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from preamp_bench.records import append, provenance

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TOLD = 3
"""Exit status of a process that has ended because another one was gone, and says so."""

Report = Callable[[str], None]
"""Writes a line to the process that has made the fork."""


class Forks:
    """Forks of this process, and the lines that they report, in the order of their coming."""

    def __init__(self, work: Callable[[int, Report], int | None], count: int = 1) -> None:
        """Let each fork do ``work(number, report)``, whose result is its exit status."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        self._pids: list[int] = []
        self._killed: list[int] = []
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _be_fork(work, number, writing)
            self._pids.append(pid)
        os.close(writing)
        self.lines = os.fdopen(reading, errors="replace")

    def kill(self, draw: random.Random) -> None:
        """Stop all at once, or one of them."""
        self._killed = self._pids if draw.random() < 0.5 else [draw.choice(self._pids)]
        for pid in self._killed:
            os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> tuple[list[str], list[int]]:
        """Wait for all to end; return the lines that nobody has read yet, and the exit statuses.

        Raises:
            SystemExit: They have not ended after so long. All are killed then.
        """
        late = threading.Event()
        timer = threading.Timer(seconds, self._give_up, [late])
        timer.daemon = True
        timer.start()
        try:
            with self.lines:
                rest = self.lines.readlines()  # or they could write no more
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        finally:
            timer.cancel()
        if late.is_set():
            raise SystemExit("a process waits for one that was killed")
        return rest, codes

    def wait_after_kill(
        self, seconds: float = threading.TIMEOUT_MAX, *, may_finish: bool
    ) -> list[str]:
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

    def _give_up(self, late: threading.Event) -> None:
        late.set()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _be_fork(work: Callable[[int, Report], int | None], number: int, pipe: int) -> NoReturn:
    def report(line: str) -> None:
        one_line = line.replace("\n", " ")
        os.write(pipe, f"{one_line}\n".encode("utf-8", "backslashreplace"))

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


def asked(
    text: str | None, arguments: Sequence[str] | None, **options: tuple[Any, str]
) -> argparse.Namespace:
    """Read a command line, on one thread from here on.

    Args:
        text: What ``--help`` says.
        arguments: The command line; ``None`` is the process's own.
        options: By name the default, whose type the option has, and its help.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, what) in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=what
        )
    torch.set_num_threads(1)
    return parser.parse_args(arguments)


def keep(file: Path, benchmark: str, rows: Iterable[dict[str, Any]]) -> None:
    """Append what was measured to a file of results, with where it was."""
    where = {"benchmark": benchmark, "status": "measured", **provenance(torch.device("cpu"))}
    append(file, [{**row, **where} for row in rows])
