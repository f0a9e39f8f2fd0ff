# SPDX-License-Identifier: BSD-3-Clause
"""What ranks check of ``torch.distributed.checkpoint.state_dict``, sharded and whole."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import preamp
from cases.selection import combinations
from cases.tolerances import assert_same
from preamp.optimizers import FusedAdam

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "whole, from the first rank": {"full_state_dict": True, "cpu_offload": True},
}


def _start(level: str, storage: str, kind: Any, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]
    optimizer = kind(groups, lr=0.01)
    more: Any = {"storage": storage, "verbosity": 0, "backend": "reference"}
    return preamp.initialize(model, optimizer, opt_level=level, **more)


def _train(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        loss = model(torch.randn(4, 7, generator=generator)).square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


def _everything(model: Any, optimizer: Any) -> list[torch.Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    values = [*model.state_dict().values(), *model.parameters(), *state]
    values = [value for value in values if isinstance(value, torch.Tensor)]
    return [getattr(value.detach(), "full_tensor", value.detach)().clone() for value in values]


def check_state_dicts_resume_bitwise() -> None:
    for level, storage, kind, name, is_new in combinations(
        ("O2", "O5"), ("full", "compact"), (FusedAdam, optim.AdamW), OPTIONS, (True, False), size=2
    ):
        storage = storage if kind is FusedAdam else "full"
        model, optimizer = _start(level, storage, kind, 0)
        _train(model, optimizer, range(2))
        told = dict(OPTIONS[name])
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**told))
        if "full_state_dict" in told and (dist.get_rank() == 0 or "cpu_offload" not in told):
            assert weights["0.weight"].dtype is torch.float32
            assert weights["0.weight"].shape == (9, 7)
        weights, state = copy.deepcopy(weights), copy.deepcopy(state)
        other, others = _start(level, storage, kind, 1)
        if not is_new:
            _train(other, others, range(5, 6))
        if told.pop("cpu_offload", False):  # other ranks have nothing
            told["broadcast_from_rank0"] = True
        options = StateDictOptions(**told)
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, others, state, options=options)
        preamp.load_state_dict(other, preamp.state_dict(model))
        for one, its in ((model, optimizer), (other, others)):
            _train(one, its, range(2, 4))
        _assert_alike((model, optimizer), (other, others), f"{level}, {storage}, {kind}, {name}")


def check_files_of_torch_resume_bitwise() -> None:
    """``dcp.save``, and ``dcp.load`` into what ``get_state_dict`` has returned."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    runs = [_start("O5", "split", FusedAdam, seed) for seed in range(2)]
    _train(*runs[0], range(2))
    names = "model_state_dict", "optim_state_dict"
    folder = str(Path(folders[0]) / "step")
    dcp.save(dict(zip(names, get_state_dict(*runs[0]), strict=True)), checkpoint_id=folder)
    found = dict(zip(names, get_state_dict(*runs[1]), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(*runs[1], **found)
    for run in runs:
        _train(*run, range(2, 4))
    _assert_alike(*runs, "files")


def _assert_alike(one: Any, other: Any, where: str) -> None:
    for ours, wanted in zip(_everything(*other), _everything(*one), strict=True):
        assert_same(ours, wanted, where)
