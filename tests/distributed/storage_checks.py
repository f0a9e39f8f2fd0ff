# SPDX-License-Identifier: BSD-3-Clause
"""What ranks check of masters and moments in fewer bits: however they are shared, to the bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import preamp
from distributed.ranks import each, whole
from kit.compare import same
from kit.refusals import refused
from preamp import Storage
from preamp.optimizers import FusedAdam, FusedSGD

# fully_shard of torch 2.6 needs events of streams, which its CPUs lack
SHARDS = hasattr(torch.cpu.Stream, "record_event")
WAYS = ("ddp", "fully_shard") if SHARDS else ("ddp",)


STORAGES = {
    "compact": Storage(masters="split", moments="8bit", seed=5),
    "8bit": Storage(moments="8bit", seed=5),
    "bfloat16": Storage(moments="bfloat16", seed=5),
    "full": Storage(),
}
SPLIT = {
    "split": Storage(masters="split"),
    "host": Storage(masters="split", place="host"),  # where nothing moves, the same training
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


class MomentRun:
    """A run whose gradients depend on neither the weights nor the ranks."""

    def __init__(
        self,
        storage: str,
        way: str = "",
        *,
        level: str = "O5",
        kind: str = "adam",
        strided: bool = False,
        seed: int = 0,
    ) -> None:
        self.inner = Net(seed)
        if way == "fully_shard":
            fully_shard(self.inner)
        if strided:  # which fully_shard does not take
            self.inner.conv.to(memory_format=torch.channels_last)
        self.optimizer = BUILDS[kind](self.inner.parameters())
        options: dict[str, Any] = {"storage": {**STORAGES, **SPLIT}[storage], "verbosity": 0}
        # On gradients that are put in place no other scale can be.
        preamp.initialize(self.inner, self.optimizer, opt_level=level, loss_scale=1.0, **options)
        self.model = DistributedDataParallel(self.inner) if way == "ddp" else self.inner

    def step(self, number: int) -> None:
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
        """Copies of weights and state, whole, on every rank."""
        state = self.optimizer.state_dict()["state"]
        moments = [sorted(state[number].items()) for number in sorted(state)]
        return {
            "weights": list(map(whole, self.inner.state_dict().values())),
            "state": [[(key, _plain(value)) for key, value in one] for one in moments],
        }


def _plain(value: Any) -> Any:
    return whole(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def check_all_ways_to_share_have_the_same_bits() -> None:
    """As one process alone, whose split masters are full ones."""
    for storage, kind, level in each((*STORAGES, *SPLIT), BUILDS, ("O5", "O4")):
        for strided, ways in ((False, WAYS), (True, ("ddp",))):
            is_split = storage in (*SPLIT, "compact")
            if (is_split and level == "O4") or (strided and kind == "sgd"):
                continue
            found = []
            for way in (*ways, ""):  # the last one is alone
                own = "split" if storage == "host" and not way else storage
                run = MomentRun(own, way, level=level, kind=kind, strided=strided)
                for number in range(3):
                    run.step(number)
                found.append(run.whole())
                preamp.engine_of(run.inner).close()
            assert all(same(one, found[-1]) for one in found), (storage, kind, level, strided)


READS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda master: master.detach(),
    "to_local": lambda master: master.to_local(),
    "full_tensor": lambda master: master.full_tensor(),
    "_local_tensor": lambda master: master._local_tensor,
    "redistribute": lambda master: master.redistribute(placements=master.placements),
    "a flattened wrapper": lambda master: getattr(master, master.__tensor_flatten__()[0][0]),
}


def check_reading_split_masters_is_refused() -> None:
    """Methods of a ``DTensor`` take this rank's part past torch's own door."""
    for storage in ("split", "compact") if SHARDS else ():
        run = MomentRun(storage, "fully_shard")
        run.step(0)
        for master in preamp.master_params(run.optimizer):
            assert master.shape == master.twin.half.shape  # type: ignore[attr-defined]
            for name, read in READS.items():
                with pytest.raises(preamp.PreampStateError, match="that is split"):
                    raise AssertionError(f"{storage}: {name}: {read(master)}")


def check_columns_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]))
    optimizer = FusedAdam([param])
    optimizer.storage = STORAGES["8bit"]
    param.grad = distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)])
    with refused("distributed", "moments of columns"):
        optimizer.step()
    assert not optimizer.state
