# SPDX-License-Identifier: BSD-3-Clause
"""Two ranks whose masters and moments lie on the host: the bits of the same storage on the device.

The ranks average gradients, or share out weights. Each has its part of masters and moments on its
host; checkpoints go from one place to the other.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp
from devices import host_runs
from devices.pretended.ranks import on_ranks
from preamp.checkpoint import random_states
from preamp.core.tensors import local_of
from preamp.kernels import staged

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended",
    reason="no pretended device here",
)
RANKS = 2
PLACES = ("device", "host")
PROGRAM = "backward 0; clip .5; step; zero; backward 1 inf; backward 2; clip .5; step; zero; "
PROGRAM += "backward 3; clip .5; step; zero"


class Sharded(nn.Sequential):
    """Its last weight has one row, so a rank has none of it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 129), nn.GELU(), nn.Linear(129, 1))

    def cuda(self, device: Any = None) -> Any:
        super().cuda(device)
        mesh = init_device_mesh("cuda", (RANKS,))
        fully_shard(self[0], mesh=mesh)
        return fully_shard(self, mesh=mesh)


def averaged() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 129), nn.GELU(), nn.Linear(129, 1))


class Run(host_runs.Run):
    """A model that two ranks train."""

    def __init__(self, way: str, level: str, storage: str, place: str) -> None:
        sharded = way == "fully_shard"
        # The former takes norms of whole tensors; neither has a bias to correct, which a device
        # does in float32 under a dynamic scale.
        kind = "FusedLARS" if (way, storage) == ("fully_shard", "full") else "FusedAdagrad"
        super().__init__(place, (level, storage), kind, Sharded if sharded else averaged)
        self.wrapped = self.model if sharded else DistributedDataParallel(self.model)

    def loss(self, index: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(RANKS * index + dist.get_rank())
        return self.wrapped(torch.randn(8, 16, generator=generator).cuda()).float().square().mean()

    def state(self) -> list[torch.Tensor]:
        return list(map(local_of, super().state()))

    def everything(self) -> list[torch.Tensor]:
        """This rank's parts, on the CPU."""
        weights = [*self.model.parameters(), *self.values()]
        return [local_of(t.detach()).cpu().clone() for t in weights] + [
            t.cpu() for t in self.state()
        ]

    def play_all(self) -> None:
        """At a static scale nothing may overflow."""
        dynamic = self.engine.policy.is_dynamic
        self.play(PROGRAM if dynamic else PROGRAM.replace(" inf", ""))


def saved_by(run: Run) -> dict[str, Any]:
    return {"run": preamp.RunState(run.wrapped, run.optimizer)}


def assert_same(some: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(some, other, strict=True)] == [True] * len(some)


def check(rank: int, way: str, level: str, storage: str, folder: Path) -> None:
    staged.RUN = 4096  # type: ignore[misc]  # lets a few tensors be several runs
    random_states._DEVICES = ()  # pyright: ignore[reportPrivateUsage]  # the pretended device has no generators
    runs = {place: Run(way, level, storage, place) for place in PLACES}
    for place, run in runs.items():
        run.play_all()
        dcp.save(saved_by(run), checkpoint_id=folder / place)
    host = runs["host"]
    assert_same(host.everything(), runs["device"].everything())
    assert {tensor.device.type for tensor in host.state()} == {"cpu"}
    if level != "O0":
        twins = [master.twin for master in host.masters()]
        assert {local_of(twin.kept).device.type for twin in twins} == {"cpu"}
    for run in runs.values():
        run.play_all()
    after = host.everything()
    for place, run in runs.items():
        dcp.load(saved_by(run), checkpoint_id=folder / PLACES[place == "device"])
        run.play_all()
        assert_same(run.everything(), after)
        run.close()
    params = [[local_of(p.detach()) for p in run.model.parameters()] for run in runs.values()]
    assert {param.device.type for own in params for param in own} == {"cuda"}
    assert_same(*[[param.cpu() for param in own] for own in params])
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
