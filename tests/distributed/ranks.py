# SPDX-License-Identifier: BSD-3-Clause
"""Run checks on several processes at once, and report what failed where; what checks share.

A check is a function of a module; every rank calls it. A rank that fails stops, whereupon gloo
tells the others, and a deadline covers what gloo does not notice. Engines that a check leaves open
are closed after it, and those of an iteration over `each` before the next.
"""

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases.ranks import join_ranks, leave_ranks, start_ranks, wait_for_others
from cases.selection import combinations
from cases.tolerances import assert_same
from kit.engines import close_engines, note_engines

Check = Callable[[], None]

DEADLINE_SECONDS = 300

RUNS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event") and torch.__version__[:4] != "2.8."
"""Whether a model under ``fully_shard`` can.

In torch 2.6 none could, and 2.8 adds float32 and bfloat16 gradients up that it has to average.
"""
needs_fully_shard = pytest.mark.skipif(
    not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs"
)


def checks_of(module: ModuleType, prefix: str = "check_") -> list[Check]:
    """The functions of ``module`` whose names start with ``prefix``."""
    return [item for name, item in vars(module).items() if name.startswith(prefix)]


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
    note_engines()
    join_ranks(rank, world_size, folder, 120)
    report = folder / f"rank{rank}.txt"
    for check in checks:
        report.write_text(f"did not return from {check.__name__}")
        torch.manual_seed(0)
        try:
            check()
            close_engines()
        except BaseException:
            report.write_text(f"{check.__name__} on rank {rank}:\n{traceback.format_exc()}")
            return
    report.write_text("passed")
    wait_for_others()
    leave_ranks()


# -- what checks share ----------------------------------------------------------------------------


def each(*axes: Iterable[Any], size: int = 1) -> Iterator[Any]:
    """`combinations`, or the values of one axis."""
    for row in combinations(*axes, size=size):
        yield row if len(axes) > 1 else row[0]
        close_engines()


def by_rank(*choices: Any) -> Any:
    """The choice of this rank."""
    return choices[dist.get_rank()]


def everywhere(mine: torch.Tensor) -> list[torch.Tensor]:
    """What all ranks have."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def assert_equal_everywhere(*tensors: torch.Tensor) -> None:
    """To the bit."""
    first, *others = everywhere(torch.cat([t.detach().float().flatten() for t in tensors]))
    for other in others:
        assert_same(other, first)


def whole(value: Any) -> torch.Tensor:
    """A copy of all of a tensor, sharded or not."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for part in model.children():
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model
