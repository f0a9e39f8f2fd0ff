# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that broadcast or average weights between steps by collectives, as local SGD does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import broadcast as bound_early

import preamp
from cases.levels import WITH_MASTERS
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from preamp.kernels import stored
from preamp.optimizers import FusedSGD

Params = list[nn.Parameter]


def _mean(param: torch.Tensor) -> None:
    dist.all_reduce(param)
    param.div_(2)


def _coalesced(params: Params) -> None:
    dist.all_reduce_coalesced([param.data for param in params])
    for param in params:
        param.data.div_(2)


def _gathered(params: Params) -> None:
    """Each rank's row of what is one tensor."""
    for param in params:
        rows = [param.data[:1], param.data[1:]]
        dist.all_gather(rows, rows[dist.get_rank()].clone())


def _scattered(params: Params) -> None:
    for param in params:
        given = [param.detach().clone() for _ in range(2)] if dist.get_rank() == 0 else None
        dist.scatter(param.data, given, 0)


def _later(params: Params) -> None:
    works: list[Any] = [dist.broadcast(param.data, 0, async_op=True) for param in params]
    for work in works:
        work.wait()


HALF_WAYS: dict[str, Callable[[Params], object]] = {
    "broadcast": lambda params: [dist.broadcast(param, 0) for param in params],
    "broadcast, data": lambda params: [dist.broadcast(param.data, 1) for param in params],
    "broadcast, bound early": lambda params: [bound_early(param.data, 0) for param in params],
    "broadcast, later": _later,
    "mean": lambda params: [_mean(param) for param in params],
    "mean, data": lambda params: [_mean(param.data) for param in params],
    "mean, coalesced": _coalesced,
    "gathered": _gathered,
    "scattered": _scattered,
}


def start(level: str, rank: int, storage: str = "full") -> tuple[nn.Module, Any]:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    preamp.initialize(
        model, optimizer, opt_level=level, storage=storage, loss_scale=8.0, verbosity=0
    )
    return model, optimizer


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    """On data of ``seed``, which ranks have in common or not."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    with preamp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def between_steps(rank: int) -> dict[str, Any]:
    """Two steps by itself on each rank, a collective on weights, and one on the same data."""
    found: dict[str, Any] = {}
    for level in WITH_MASTERS:
        for storage in ("full", "split"):
            for way, write in HALF_WAYS.items():
                model, optimizer = start(level, rank, storage)
                step(model, optimizer, rank)
                step(model, optimizer, rank + 2)
                with torch.no_grad():
                    write(list(model.parameters()))
                halves = [param.detach().clone() for param in model.parameters()]
                exact = list(model.state_dict().values())
                step(model, optimizer, 9)
                found[f"{level}, {storage}, {way}"] = halves, exact, list(model.parameters())
    return found


def test_half_weights_that_collectives_have_made_count(tmp_path: Path) -> None:
    """Each rank keeps digits of its own beyond them, less than the half weights differ by."""
    first, second = run_ranks(between_steps, tmp_path)
    assert first
    for case, (halves, exact, trained) in first.items():
        round_ = stored.split if "split" in case else lambda v, dtype: [v.to(dtype)]
        for half, value in zip(halves, exact, strict=True):
            assert_same(round_(value, half.dtype)[0], half, case)
        for mine, theirs in zip(halves, second[case][0], strict=True):
            assert_same(mine, theirs, case)
        for mine, theirs in zip(trained, second[case][2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=2.0**-8)


def of_masters(rank: int) -> dict[str, Any]:
    """What the next forward sees of averages of masters, and that nothing of them is lost."""
    found: dict[str, Any] = {}
    for level in WITH_MASTERS:
        for storage in ("full", "split"):
            model, optimizer = start(level, rank, storage)
            step(model, optimizer, rank)
            if storage == "full":
                for param in preamp.master_params(optimizer):
                    _mean(param.data)
            else:
                with preamp.engine_of(model).exact_weights():
                    for param in model.parameters():
                        _mean(param.data)
            with torch.no_grad():
                model(torch.ones(1, 3))
            seen = [param.detach().clone() for param in model.parameters()]
            wanted = list(model.state_dict().values())
            step(model, optimizer, 9)
            found[f"{level}, {storage}"] = seen, wanted, list(model.state_dict().values())
    return found


def test_forwards_see_averages_of_masters(tmp_path: Path) -> None:
    first, second = run_ranks(of_masters, tmp_path)
    for case, (seen, wanted, trained) in first.items():
        for half, master in zip(seen, wanted, strict=True):
            torch.testing.assert_close(half.float(), master, rtol=2.0**-8, atol=2.0**-24)
        for mine, theirs in zip(
            [*wanted, *trained], [*second[case][1], *second[case][2]], strict=True
        ):
            assert_same(mine, theirs, case)
