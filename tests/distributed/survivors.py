# SPDX-License-Identifier: BSD-3-Clause
"""Run two ranks of which the second dies or hangs, and hear what the first has to say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cases.ranks import start_ranks

PATIENCE_SECONDS = 60  # of the test, on a machine that others use as well


def reason_of_first(run_rank: Callable[[int, Path, str], None], folder: Path, how: str) -> str:
    """Return what the first rank wrote to the file ``reason`` in ``folder`` before it ended."""
    ranks = start_ranks(run_rank, (folder, how), 2).processes
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not (folder / "reason").exists():
            assert time.monotonic() < deadline, "the first rank still waits for the second"
            assert ranks[0].exitcode in (None, 0)
            time.sleep(0.05)
        ranks[0].join(PATIENCE_SECONDS)
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return (folder / "reason").read_text()
