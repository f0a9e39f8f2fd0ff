# SPDX-License-Identifier: BSD-3-Clause
"""What ranks check of split masters: the run is that of full storage, to the bit."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import preamp
from cases.selection import combinations
from cases.tolerances import assert_same
from preamp.core.tensors import local_of
from preamp.kernels.stored import join, split
from preamp.optimizers import FusedAdam, FusedLAMB

WAYS = ("ddp", "fully_shard")
if not hasattr(torch.cpu.Stream, "record_event"):  # which fully_shard of torch 2.6 needs
    WAYS = ("ddp",)


def _start(way: str, level: str, storage: Any, kind: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5))
    if way == "fully_shard":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = kind(model.parameters(), lr=0.01)
    preamp.initialize(
        model, optimizer, opt_level=level, storage=storage, verbosity=0, backend="reference"
    )
    wrapped = model if way == "fully_shard" else nn.parallel.DistributedDataParallel(model)
    return model, wrapped, optimizer


def _bring_to_split(optimizer: Any) -> None:
    """Let an engine in full storage have what a split one can hold; torch counts no write."""
    for session in preamp.engine_of(optimizer).sessions.values():
        for twin in session.masters or ():
            own, master = local_of(twin.half.detach()), local_of(twin.master.detach())
            half, low = split(master, twin.half.dtype)
            own.data.copy_(half)
            master.data.copy_(join(half, low))


def _train(way: str, level: str, storage: Any, kind: Any) -> dict[str, torch.Tensor]:
    model, wrapped, optimizer = _start(way, level, storage, kind)
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
        loss = wrapped(torch.randn(4, 7, generator=generator)).square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            (scaled * float("inf") if number == 1 and level == "O2" else scaled).backward()
        preamp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if storage == "full":
            _bring_to_split(optimizer)
    halves = {f"half {name}": _whole(param) for name, param in model.named_parameters()}
    state = {name: _whole(value) for name, value in model.state_dict().items()}
    preamp.engine_of(optimizer).close()
    closed = {f"closed {name}": _whole(value) for name, value in model.state_dict().items()}
    return {**halves, **state, **closed}


def _whole(value: Any) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


READS: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda master: master.to_local(),
    "full_tensor": lambda master: master.full_tensor(),
    "_local_tensor": lambda master: master._local_tensor,
    "redistribute": lambda master: master.redistribute(placements=master.placements),
    "detach": lambda master: master.detach(),
    "a flattened wrapper": lambda master: getattr(master, master.__tensor_flatten__()[0][0]),
}


def check_reading_split_masters_is_refused() -> None:
    """Methods of a ``DTensor`` take this rank's part past torch's own door."""
    for storage in ("split", "compact") if "fully_shard" in WAYS else ():
        model, _, optimizer = _start("fully_shard", "O5", storage, FusedAdam)
        _iterate(model, optimizer, 0)
        for master in preamp.master_params(optimizer):
            assert master.shape == master.twin.half.shape  # type: ignore[attr-defined]
            for name, read in READS.items():
                with pytest.raises(preamp.PreampStateError, match="that is split"):
                    raise AssertionError(f"{storage}: {name}: {read(master)}")


def _iterate(model: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(4, 7, generator=generator)).square().mean()
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def check_the_host_of_cpus_on_ranks() -> None:
    """Where nothing moves, ``place="host"`` is the same training."""
    for way, kind in itertools.product(WAYS, (FusedAdam, FusedLAMB)):
        beside, host = (
            _train(way, "O2", preamp.Storage(masters="split", place=place), kind)
            for place in ("device", "host")
        )
        assert beside.keys() == host.keys()
        for name, value in beside.items():
            assert_same(host[name], value, f"{way}, {kind.__name__}: {name}")


def check_split_masters_on_ranks() -> None:
    for way, level, kind in combinations(WAYS, ("O2", "O5"), (FusedAdam, FusedLAMB)):
        full, halved = (_train(way, level, storage, kind) for storage in ("full", "split"))
        assert full.keys() == halved.keys()
        for name, value in full.items():
            assert_same(halved[name], value, f"{way}, {level}, {kind.__name__}: {name}")
