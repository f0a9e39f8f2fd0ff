# SPDX-License-Identifier: BSD-3-Clause
"""Forks hand over whole lines, and end all of them where one hangs."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from attack_frame import TOLD, Forks, Report


def test_lines_of_several_are_whole_however_long_they_are() -> None:
    def work(number: int, report: Report) -> int:
        for _ in range(10):
            report(f"{number}\n" * 40_000)
        return number

    lines, codes = Forks(work, 3).wait()
    assert sorted(lines) == [f"{number} " * 40_000 for number in range(3) for _ in range(10)]
    assert codes == [0, 1, 2]


def test_one_that_hangs_ends_all() -> None:
    def work(number: int, report: Report) -> None:
        report(str(os.getpid()))
        if number:
            time.sleep(3600)

    forks = Forks(work, 2)
    pids = [int(next(forks.lines)) for _ in range(2)]
    with pytest.raises(SystemExit, match="a process waits for one that was killed"):
        forks.wait(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_those_that_were_not_killed_have_to_tell() -> None:
    def work(number: int, report: Report) -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TOLD))
        report(f"{number} {os.getpid()}")
        time.sleep(3600)
        return 0

    draw = random.Random(0)
    for _ in range(6):
        forks = Forks(work, 2)
        pids = [int(next(forks.lines).split()[1]) for _ in range(2)]
        forks.kill(draw)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert forks.wait_after_kill(may_finish=False) == []
