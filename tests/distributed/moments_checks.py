# SPDX-License-Identifier: BSD-3-Clause
"""What ranks check of moments in fewer bits: however they are shared, the bits are the same."""

import copy
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.selection import combinations
from kit.compare import same
from kit.refusals import refused
from preamp import Storage
from preamp.optimizers import FusedAdam, FusedSGD

Parallel = Literal["none", "ddp", "fsdp"]
# fully_shard of torch 2.6 needs events of streams, which its CPUs lack
WAYS: tuple[Parallel, ...] = ("ddp", "fsdp")[: 1 + hasattr(torch.cpu.Stream, "record_event")]
STORAGES = {
    "compact": Storage(masters="split", moments="8bit", seed=5),
    "8bit": Storage(moments="8bit", seed=5),
    "bfloat16": Storage(moments="bfloat16", seed=5),
    "full": Storage(),
}
BUILDS: dict[str, Any] = {
    "adam": lambda params: FusedAdam(params, lr=0.0625, eps=1e-4),
    "sgd": lambda params: FusedSGD(params, lr=0.0625, momentum=0.9),
}


class Net(nn.Module):
    """Rows of 72 elements, blocks of a row that differ in length, and tensors without blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(8, 60, 3)
        self.inner = nn.Linear(60, 131)
        self.head = nn.Linear(131, 37)
        with torch.no_grad():  # masters that DDP gives to all ranks start from half weights
            for param in self.parameters():
                param.copy_(param.bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.conv(x).relu().mean((2, 3))).relu())


class Run:
    """A run whose gradients are the same, to the bit, however ranks share it."""

    def __init__(
        self,
        storage: str,
        parallel: Parallel,
        *,
        seed: int = 0,
        level: str = "O5",
        kind: str = "adam",
        strided: bool = False,
    ) -> None:
        self.inner = Net(seed)
        if parallel == "fsdp":
            fully_shard(self.inner)
        if strided:  # which fully_shard does not take
            self.inner.conv.to(memory_format=torch.channels_last)
        self.optimizer = BUILDS[kind](self.inner.parameters())
        preamp.initialize(
            self.inner,
            self.optimizer,
            opt_level=level,
            verbosity=0,
            storage=STORAGES[storage],
            loss_scale=1.0,  # on gradients that are put in place nothing else can be
        )
        self.engine, self.model = preamp.engine_of(self.inner), self.inner
        if parallel == "ddp":
            self.model = DistributedDataParallel(self.inner)

    def step(self, number: int) -> None:
        """On gradients that do not depend on the weights, nor on the number of ranks."""
        random = torch.Generator().manual_seed(number)
        with preamp.scale_loss(self.model(torch.ones(1, 8, 3, 3)).sum(), self.optimizer) as scaled:
            scaled.backward()  # so that the engine knows what reduces gradients
        for param in self.inner.parameters():
            grad = torch.randn(param.shape, generator=random).to(param.dtype)
            if hasattr(param, "device_mesh"):
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            else:
                param.grad = torch.empty_like(param).copy_(grad)
        self.optimizer.step()

    def whole(self) -> dict[str, Any]:
        """Float32 values and the optimizer's state, whole, on every rank."""
        weights, state = self.inner.state_dict(), self.optimizer.state_dict()
        whole = {
            "weights": [full(value) for value in weights.values()],
            "state": [
                {key: full(value) for key, value in sorted(state["state"][number].items())}
                for number in sorted(state["state"])
            ],
        }
        return copy.deepcopy(whole)  # later steps write to what they are

    def close(self) -> None:
        self.engine.close()


def check_all_ways_to_share_have_the_same_bits() -> None:
    for storage, kind, level in combinations(STORAGES, BUILDS, ("O5", "O4")):
        for strided, ways in ((False, WAYS), (True, ("ddp",))):
            if (storage == "compact" and level == "O4") or (strided and kind == "sgd"):
                continue
            found: list[Any] = []
            for parallel in ways:
                run = Run(storage, parallel, level=level, kind=kind, strided=strided)
                for number in range(3):
                    run.step(number)
                found.append(run.whole())
                run.close()
                assert same(found[-1], found[0]), (storage, kind, level, parallel, strided)


def check_columns_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]))
    optimizer = FusedAdam([param])
    optimizer.storage = STORAGES["8bit"]
    param.grad = distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)])
    with refused("distributed", "moments of columns"):
        optimizer.step()
    assert not optimizer.state


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
