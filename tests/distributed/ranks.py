# SPDX-License-Identifier: BSD-3-Clause
"""Run checks on several processes at once, and report what failed where.

A check is a function of a module; every rank calls it. A rank that fails stops, whereupon gloo
tells the others, and a deadline covers what gloo does not notice.
"""

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from cases.ranks import join_ranks, leave_ranks, start_ranks, wait_for_others

Check = Callable[[], None]

DEADLINE_SECONDS = 300

RUNS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event") and torch.__version__[:4] != "2.8."
"""Whether a model under ``fully_shard`` can.

In torch 2.6 none could, and 2.8 adds float32 and bfloat16 gradients up that it has to average.
"""


def checks_of(module: ModuleType) -> list[Check]:
    """The functions of ``module`` whose names start with ``check_``."""
    return [item for name, item in vars(module).items() if name.startswith("check_")]


def assert_pass(checks: Sequence[Check], world_size: int, folder: Path) -> None:
    """Run ``checks`` on ``world_size`` ranks; all must pass on all of them."""
    assert checks
    context = start_ranks(_rank_main, (checks, world_size, folder), world_size)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"still running: {_reports(folder)}"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    reports = _reports(folder)
    assert reports == {f"rank{rank}.txt": "passed" for rank in range(world_size)}, "\n".join(
        reports.values()
    )


def _reports(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("rank*.txt"))}


def _rank_main(rank: int, checks: Sequence[Check], world_size: int, folder: Path) -> None:
    warnings.simplefilter("error")
    # torch 2.6 says so of every mesh of CPUs.
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
    join_ranks(rank, world_size, folder, 120)
    report = folder / f"rank{rank}.txt"
    for check in checks:
        report.write_text(f"did not return from {check.__name__}")
        torch.manual_seed(0)
        try:
            check()
        except BaseException:
            report.write_text(f"{check.__name__} on rank {rank}:\n{traceback.format_exc()}")
            return
    report.write_text("passed")
    wait_for_others()
    leave_ranks()
