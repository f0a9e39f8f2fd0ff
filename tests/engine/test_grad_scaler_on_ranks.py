# SPDX-License-Identifier: BSD-3-Clause
"""``preamp.GradScaler`` on two ranks: the same steps, scales and clips on both."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.levels import EXACT, WITH_MASTERS
from cases.models import Damage, Exact, batch
from cases.ranks import run_ranks
from cases.selection import combinations
from cases.tolerances import assert_same
from distributed.ranks import RUNS_ON_CPUS

STEPS = 4


def _step(model: Any, loss_of: Any, scaler: Any, optimizer: Any, *, clips: bool) -> None:
    for part in range(2):
        is_last = part == 1
        with nullcontext() if is_last else model.no_sync():
            scaler.scale(loss_of(part)).backward()
    if clips:
        scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad.mul_(0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def _train(level: str | None, rank: int, *, view: bool, clips: bool) -> list[Any]:
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if level is None:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    else:
        options: Any = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
        preamp.initialize(model, optimizer, **options)
        scaler = preamp.GradScaler(optimizer, init_scale=2.0**10)
    wrap: Any = DistributedDataParallel
    wrapped = wrap(model, gradient_as_bucket_view=view)
    damage = Damage(model.linear.weight, float("inf"))
    for step in range(STEPS):
        damage.armed = step == 2 and rank == 1  # before it is reduced: all ranks get it

        def loss_of(part: int, step: int = step) -> torch.Tensor:
            x, coefficients = batch(10 * step + 2 * part + rank)
            return (wrapped(x).float() * coefficients).sum()

        _step(wrapped, loss_of, scaler, optimizer, clips=clips)
    found = [value.float().clone() for value in model.state_dict().values()]
    if level is not None:
        preamp.engine_of(optimizer).close()
    return [*found, scaler.get_scale()]


def under_ddp(rank: int) -> dict[str, list[Any]]:
    """The weights and the loss scale of every case, with torch's scaler first."""
    found: dict[str, list[Any]] = {}
    for view, clips, level in combinations([False, True], [False, True], EXACT):
        if f"torch {clips}" not in found:
            found[f"torch {clips}"] = _train(None, rank, view=view, clips=clips)
        found[f"{level}, {view=} {clips}"] = _train(level, rank, view=view, clips=clips)
    return found


def _sharded(level: str, rank: int, change: Any) -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator).float())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    scaler = preamp.GradScaler(optimizer, init_scale=4.0)
    x = torch.randint(-2, 3, (2, 4), generator=torch.Generator().manual_seed(rank)).float()
    # The second rank alone overflows in the second step.
    for factor in (1.0, float("inf") if rank == 1 else 1.0, 1.0):
        scaler.scale(model(x).float().sum() * factor).backward()
        scaler.unscale_(optimizer)
        change(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = [value.full_tensor() for value in model.state_dict().values()]
    skipped = preamp.engine_of(optimizer).steps_skipped
    preamp.engine_of(optimizer).close()
    return [*found, scaler.get_scale(), skipped]


def _halve(params: list[Any]) -> None:
    for param in params:
        param.grad.mul_(0.5)


def _clip(params: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.25)


def under_fully_shard(rank: int) -> dict[str, list[Any]]:
    """The weights and the loss scale of every case."""
    changes = {"halve": _halve, "clip": _clip, "nothing": lambda params: None}
    return {
        f"{level} {name}": _sharded(level, rank, change)
        for level in (*WITH_MASTERS, "O0")
        for name, change in changes.items()
    }


pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]


def test_under_ddp_it_does_what_torchs_does(tmp_path: Path) -> None:
    """With accumulation under ``no_sync``, changed gradients, and an overflow of one rank."""
    first, second = run_ranks(under_ddp, tmp_path)
    for name, found in first.items():
        _compare(second[name], found, name)
        _compare(found, first[f"torch {name.rpartition(' ')[2]}"], name)


@pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs")
def test_under_fully_shard_all_parts_get_one_factor(tmp_path: Path) -> None:
    """Every rank has other values to tell a clip from; all take the same."""
    first, second = run_ranks(under_fully_shard, tmp_path)
    for name, found in first.items():
        assert found[-2:] == [2.0, 1], name
        _compare(second[name], found, name)
        wanted = first["O0 " + name.partition(" ")[2]]
        for mine, exact in zip(found[:-2], wanted[:-2], strict=True):
            # Weights are rounded for the forward; the updates add up to 2**-5, clipped, or to 1.
            atol = 2.0**-11 if "clip" in name else 2.0**-7
            torch.testing.assert_close(mine, exact, rtol=0, atol=atol)


def _compare(some: list[Any], others: list[Any], name: str) -> None:
    for mine, its in zip(some, others, strict=True):
        assert_same(mine, its, name)
