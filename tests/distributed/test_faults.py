# SPDX-License-Identifier: BSD-3-Clause
"""A rank that dies or hangs: the others raise, with the reason, and what they have is whole."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from torch import multiprocessing

from distributed.dying_rank import run_rank

PATIENCE_SECONDS = 60  # of the test, on a machine that others use as well


@pytest.mark.parametrize(
    ("how", "reason"), [("dies", "closed by peer|reset by peer"), ("hangs", "[Tt]imed out")]
)
def test_the_others_raise_in_time(tmp_path: Path, how: str, reason: str) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not (tmp_path / "reason").exists():
            assert time.monotonic() < deadline, "the first rank still waits for the second"
            assert ranks[0].exitcode in (None, 0)
            time.sleep(0.05)
        ranks[0].join(PATIENCE_SECONDS)
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert re.search(reason, (tmp_path / "reason").read_text())
