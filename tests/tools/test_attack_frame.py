# SPDX-License-Identifier: BSD-3-Clause
"""Forks hand over whole lines, and what they ended with."""

from __future__ import annotations

import signal
import time

from attack_frame import Forks, Report


def test_lines_of_several_are_whole_however_long_they_are() -> None:
    def work(number: int, report: Report) -> None:
        for _ in range(10):
            report(f"{number}\n" * 40_000)
        if number == 2:
            raise SystemExit

    lines, codes = Forks(work, 3).wait()
    assert sorted(lines) == [f"{number} " * 40_000 for number in range(3) for _ in range(10)]
    assert codes == [0, 0, 1]


def test_all_are_killed() -> None:
    def work(number: int, report: Report) -> None:
        report(str(number))
        time.sleep(3600)

    forks = Forks(work, 2)
    assert {next(forks.lines), next(forks.lines)} == {"0", "1"}
    forks.kill()
    assert forks.wait() == ([], [-signal.SIGKILL] * 2)
