# SPDX-License-Identifier: BSD-3-Clause
"""Run checks on several processes at once, and report what failed where; what checks share.

A check is a function of a module; every rank calls it. A rank that fails stops, whereupon gloo
tells the others, and a deadline covers what gloo does not notice. Engines that a check leaves open
are closed after it, and those of an iteration over `each` before the next.
"""

import random
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
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.ranks import join_ranks, leave_ranks, start_ranks, wait_for_others
from cases.selection import combinations
from cases.tolerances import assert_same
from kit.engines import close_engines, note_engines
from preamp.optimizers import FusedAdam, FusedSGD

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


KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.01, momentum=0.5),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
}


class Training:
    """A model with dropout, its optimizer and a schedule; clips each step."""

    def __init__(self, level: str, storage: str, kind: str, wrap: str = "", seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.25), nn.Linear(16, 5)
        self.model: Any = nn.Sequential(*layers)
        if wrap == "fully_shard":
            fully_shard(self.model[0])
            fully_shard(self.model)
        params = list(self.model.parameters())
        groups: Any = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]
        self.optimizer = KINDS[kind](groups)
        more: Any = {"storage": storage, "verbosity": 0, "backend": "reference"}
        preamp.initialize(self.model, self.optimizer, opt_level=level, **more)
        if wrap == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.engine = preamp.engine_of(self.optimizer)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + 10 * rank)
        random.seed(seed + 10 * rank)
        self.state = preamp.RunState(self.model, self.optimizer, self.scheduler, {"rank": rank})

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, 8) + random.random()).float().square().mean()
            with preamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(self.optimizer, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        dcp.save({"run": self.state}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp.load({"run": self.state}, checkpoint_id=folder)

    def numbers(self) -> list[torch.Tensor]:
        """Weights in float32, half weights and the optimizer's state, whole."""
        entries = self.optimizer.state_dict()["state"].values()
        values = [value for entry in entries for value in entry.values()]
        values = [*self.model.state_dict().values(), *self.model.parameters(), *values]
        tensors = [value.detach() for value in values if isinstance(value, torch.Tensor)]
        return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]
