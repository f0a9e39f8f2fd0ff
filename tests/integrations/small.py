# SPDX-License-Identifier: BSD-3-Clause
"""A small task, and the loop by hand that a framework has to agree with to the bit."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME
from cases.tolerances import assert_same

LEVELS = ("O1", "O2", "O4", "O5")
WARNINGS = pytest.mark.filterwarnings("default")
"""Frameworks warn of what they do themselves."""

_kept: list[torch.library.Library] = []


def define_torchvision_ops() -> None:
    """Let torchvision be imported where its extension was built for another torch.

    Registries have it for one kind of device; timm and Lightning import it, and need no op of it.
    """
    if importlib.util.find_spec("torchvision") is None or _kept:
        return
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        importlib.import_module("torchvision")


define_torchvision_ops()


def needs(module: str) -> Any:
    """Import a framework, whatever it warns of, or skip the tests in the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


class Net(nn.Module):
    """A layer of each kind that levels treat differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def batches(count: int, size: int = 8, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs, and targets that a linear map makes of them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    inputs = [torch.randn(size, 6, generator=generator) for _ in range(count)]
    return [(x, x @ weight) for x in inputs]


def make_optimizer(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def loss_of(model: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)


START = {"verbosity": 0}


def without_skips(level: str) -> dict[str, Any]:
    """Options with which a level takes every step, so that its losses can be like float32's."""
    return {"loss_scale": 128.0} if BY_NAME[level].half is torch.float16 else {}


def near(losses: list[float], level: str) -> Any:
    """What equals ``losses`` of float32 as far as the level's half dtype can be like it."""
    return pytest.approx(losses, rel=0.02 if BY_NAME[level].half is torch.float16 else 0.1)


class ByHand:
    """A loop with `preamp.scale_loss`."""

    def __init__(self, level: str, model: Any = None, loss: Any = loss_of, **options: Any) -> None:
        self.model, self.loss = model or Net(), loss
        self.optimizer = make_optimizer(self.model.parameters())
        preamp.initialize(self.model, self.optimizer, opt_level=level, **START, **options)
        self.losses: list[float] = []
        self.clip: Any = preamp.clip_grad_norm_

    def run(
        self,
        data: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        every: int = 1,
        clip: float | None = None,
    ) -> ByHand:
        for number, batch in enumerate(data, 1):
            loss = self.loss(self.model, batch)
            self.losses.append(loss.item())
            with preamp.scale_loss(loss / every, self.optimizer) as scaled:
                scaled.backward()
            if number % every == 0:
                if clip is not None:
                    self.clip(self.optimizer, clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def plain_losses(data: list[tuple[torch.Tensor, torch.Tensor]], clip: float) -> list[float]:
    """The same in float32 with torch alone."""
    model = Net()
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    for batch in data:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def exact(model: nn.Module) -> dict[str, torch.Tensor]:
    """The exact weights, float32."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_models(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(exact(one).items(), exact(other).values(), strict=True):
        assert a.dtype is torch.float32
        assert_same(a, b, name)


def bits(values: Iterable[torch.Tensor]) -> Iterator[list[int]]:
    """What ranks can return of tensors."""
    for value in values:
        yield value.detach().view(torch.int32).flatten().tolist()


def fork_ranks(work: Callable[[int], Any], folder: Path, world: int = 2) -> list[Any]:
    """Call ``work`` on some ranks, which have imported all that this process has.

    They find each other as ``torchrun`` lets them, so that frameworks join them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _be_rank, (work, str(folder), port, world), world, start_method="fork"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _be_rank(rank: int, work: Callable[[int], Any], folder: str, port: int, world: int) -> None:
    if world > 1:
        _name_rank(rank, port, world)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    torch.save(work(rank), f"{rank}.pt")
    os._exit(0)  # what the parent had is not for this process to take down


def be_accelerators() -> None:
    """Have Accelerate take this rank's CPU for an accelerator; it shards on nothing else."""
    state: Any = importlib.import_module("accelerate.state")
    kind = state.DistributedType.MULTI_GPU
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state.PartialState._prepare_backend = lambda *_: ("gloo", kind)


def _name_rank(rank: int, port: int, world: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), NODE_RANK="0")
    os.environ.update(TORCHELASTIC_RUN_ID="tests", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(world))
