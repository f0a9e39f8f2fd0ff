# SPDX-License-Identifier: BSD-3-Clause
"""Two ranks whose masters and moments lie on the host: the bits of the same storage on the device.

The ranks average gradients, or share out weights. Each has its part of masters and moments on its
host; checkpoints go from one place to the other.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp
from devices.host_runs import STORAGES
from devices.pretended.ranks import on_ranks
from preamp.checkpoint import random_states
from preamp.core.tensors import local_of
from preamp.kernels import staged
from preamp.optimizers import FusedLARS, FusedLion

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended",
    reason="no pretended device here",
)
RANKS = 2
STEPS = 3
PLACES = ("device", "host")


class Run:
    """A model that two ranks train."""

    def __init__(self, way: str, level: str, storage: str, place: str, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.way, self.number = rank, way, 0
        # The last weight has one row, so a rank has none of it.
        self.net: Any = nn.Sequential(nn.Linear(32, 129), nn.GELU(), nn.Linear(129, 1)).cuda()
        if way == "fully_shard":
            mesh = init_device_mesh("cuda", (RANKS,))
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        # The former takes norms of whole tensors; neither has a bias to correct, which a device
        # does in float32 under a dynamic scale.
        kind = FusedLARS if (way, storage) == ("fully_shard", "full") else FusedLion
        self.optimizer = kind(self.net.parameters(), lr=1e-2)
        masters: Any = STORAGES[storage] if level != "O0" else {}
        preamp.initialize(
            self.net,
            self.optimizer,
            opt_level=level,
            storage=preamp.Storage(place=place, **masters),  # pyright: ignore
            backend="reference",
            verbosity=0,
        )
        sharded = way == "fully_shard"
        self.wrapped = self.net if sharded else DistributedDataParallel(self.net)

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(10 * self.number + self.rank)
        self.number += 1
        loss = self.wrapped(torch.randn(8, 32, generator=generator).cuda()).float().square().mean()
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            (scaled * float("inf") if self.number == 2 and self.is_dynamic else scaled).backward()

    @property
    def is_dynamic(self) -> bool:
        return preamp.engine_of(self.net).policy.is_dynamic

    def steps(self) -> None:
        for number in range(STEPS):
            for _ in range(1 + number % 2):  # one step of two backwards
                self.backward()
            preamp.clip_grad_norm_(self.optimizer, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def masters(self) -> list[Any]:
        return list(preamp.master_params(self.optimizer))

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[master] for master in self.masters()]
        return [
            local_of(value)
            for entry in entries
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]

    def everything(self) -> list[torch.Tensor]:
        """This rank's parts, on the CPU."""
        weights = [local_of(param.detach()) for param in self.net.parameters()]
        engine = preamp.engine_of(self.optimizer)
        exact = map(engine.exact_value, self.net.parameters())
        values = [local_of(value) for value in exact if value is not None]
        return [tensor.cpu().clone() for tensor in (*weights, *values, *self.state())]


def saved_by(run: Run) -> dict[str, Any]:
    return {"run": preamp.RunState(run.wrapped, run.optimizer)}


def assert_same(some: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(some, other, strict=True)] == [True] * len(some)


def check(rank: int, way: str, level: str, storage: str, folder: Path) -> None:
    staged.RUN = 4096  # type: ignore[misc]  # lets a few tensors be several runs
    random_states._DEVICES = ()  # pyright: ignore[reportPrivateUsage]  # the pretended device has no generators
    runs = {place: Run(way, level, storage, place, rank) for place in PLACES}
    for place, run in runs.items():
        run.steps()
        dcp.save(saved_by(run), checkpoint_id=folder / place)
    assert_same(runs["host"].everything(), runs["device"].everything())
    host = runs["host"]
    assert {tensor.device.type for tensor in host.state()} == {"cpu"}
    if level != "O0":
        twins = [master.twin for master in host.masters()]
        assert {local_of(twin.kept).device.type for twin in twins} == {"cpu"}
    for run in runs.values():
        run.steps()
    after = host.everything()
    for place, run in runs.items():
        other = PLACES[place == "device"]
        dcp.load(saved_by(run), checkpoint_id=folder / other)
        run.number = STEPS + STEPS // 2
        run.steps()
        assert_same(run.everything(), after)
    for run in runs.values():
        preamp.engine_of(run.net).close()
    params = [list(run.net.parameters()) for run in runs.values()]
    assert {local_of(param).device.type for own in params for param in own} == {"cuda"}
    assert_same(*[[local_of(param.detach()).cpu() for param in own] for own in params])
    there = {t.device.type for entry in host.optimizer.state.values() for t in entry.values()}
    assert there == {"cuda"}


@pytest.mark.parametrize(
    ("way", "level", "storage"),
    [
        ("fully_shard", "O2", "full"),
        ("fully_shard", "O2", "split"),
        ("fully_shard", "O5", "compact"),
        ("ddp", "O2", "split"),
        ("ddp", "O0", "full"),
    ],
)
def test_ranks_give_the_bits_of_the_device(
    way: str, level: str, storage: str, tmp_path: Path
) -> None:
    on_ranks(check, (way, level, storage, tmp_path), RANKS, tmp_path)
