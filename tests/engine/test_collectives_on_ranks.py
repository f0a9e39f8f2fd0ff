# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that broadcast or average weights between steps by collectives, as local SGD does."""

import warnings
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


def weights(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = model.state_dict().values()
    masters = preamp.master_params(optimizer)
    return [t.detach().clone() for t in (*model.parameters(), *state, *masters)]


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
                after = [param.detach().clone() for param in model.parameters()]
                masters = list(model.state_dict().values())
                step(model, optimizer, 9)
                found[f"{level}, {storage}, {way}"] = after, masters, weights(model, optimizer)
    return found


def test_masters_are_the_half_weights_that_collectives_have_made(tmp_path: Path) -> None:
    first, second = run_ranks(between_steps, tmp_path)
    assert first
    for case, (halves, masters, trained) in first.items():
        for half, master in zip(halves, masters, strict=True):
            assert_same(master, half.float(), case)
        for mine, theirs in zip(
            [*halves, *trained], [*second[case][0], *second[case][2]], strict=True
        ):
            assert_same(mine, theirs, case)


def of_masters(rank: int) -> dict[str, Any]:
    """What the next forward sees of averages of masters, and that nothing of them is lost."""
    found: dict[str, Any] = {}
    for level in WITH_MASTERS:
        for storage in ("full", "split"):
            model, optimizer = start(level, rank, storage)
            step(model, optimizer, rank)
            for param in preamp.master_params(optimizer):
                _mean(param.data if storage == "full" else param.detach())
            wanted = [param.detach().clone() for param in preamp.master_params(optimizer)]
            with torch.no_grad():
                model(torch.ones(1, 3))
            seen = [param.detach().clone() for param in model.parameters()]
            step(model, optimizer, 9)
            found[f"{level}, {storage}"] = seen, wanted, weights(model, optimizer)
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


def one_sided(rank: int) -> dict[str, Any]:
    """A rank tells some of all ranks its weights; gathers read them; averages come again."""
    some = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    for level in WITH_MASTERS:
        model, optimizer = start(level, rank)
        step(model, optimizer, rank)
        before = list(model.state_dict().values())
        for param in model.parameters():
            dist.broadcast(param.data, 0, group=some)
            dist.all_gather([torch.empty_like(param) for _ in range(2)], param.data)
        after = list(model.state_dict().values())
        told = []
        for number in range(3):
            step(model, optimizer, number)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for param in model.parameters():
                    _mean(param.data)
            told.append(len(caught))
        found[level] = before, after, told, [param.detach() for param in model.parameters()]
    return found


def test_who_only_tells_and_who_repeats_it(tmp_path: Path) -> None:
    first, second = run_ranks(one_sided, tmp_path)
    for level in WITH_MASTERS:
        before, after, told, halves = first[level]
        for was, now in zip(before, after, strict=True):
            assert_same(now, was, level)
        for mine, theirs in zip(after, second[level][1], strict=True):
            assert_same(theirs, mine.to(halves[0].dtype).float(), level)
        assert told == [0, 1, 0]
        assert second[level][2] == [1, 0, 0]  # the broadcast was the first time


def of_several_engines(rank: int) -> dict[str, Any]:
    """Each of three hears of its own weights, also after another has ended; then nobody listens."""
    before = dict(vars(dist.ProcessGroup))
    runs = [start(level, rank) for level in (*WITH_MASTERS, WITH_MASTERS[0])]
    found: dict[str, Any] = {}
    for turn in (0, 1):
        for model, optimizer in runs:
            step(model, optimizer, rank)
            for param in model.parameters():
                dist.broadcast(param.data, turn)
            step(model, optimizer, 9)
        found[f"{turn}"] = [weights(*run) for run in runs]
        preamp.engine_of(runs.pop(turn)[0]).close()  # the eldest, then the youngest
    assert dict(vars(dist.ProcessGroup)) != before
    preamp.engine_of(runs.pop()[0]).close()
    assert dict(vars(dist.ProcessGroup)) == before
    return found


def test_each_of_several_engines_hears_of_its_own_weights(tmp_path: Path) -> None:
    first, second = run_ranks(of_several_engines, tmp_path)
    assert [len(runs) for runs in first.values()] == [3, 2]
    for turn, runs in first.items():
        for one, other in zip(runs, second[turn], strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert_same(mine, theirs, turn)
