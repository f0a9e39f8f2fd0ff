# SPDX-License-Identifier: BSD-3-Clause
"""A small task, the loop by hand, and what a loop of any framework promises beside it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

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


# -- the contract ----------------------------------------------------------------------------------


class Loop:
    """A loop with these settings; ``build`` makes what it needs.

    Args:
        level: Of ``preamp.initialize``.
        folder: For what it writes.
        every: Batches for a step.
        clip: A norm.
        gamma: Of a schedule that multiplies the rate in each step.
        world: Processes.
        options: Of ``preamp.initialize``.
    """

    def __init__(
        self,
        level: str,
        folder: Any = None,
        *,
        every: int = 1,
        clip: float | None = None,
        gamma: float = 1.0,
        world: int = 1,
        **options: Any,
    ) -> None:
        self.level, self.folder, self.every, self.clip = level, folder, every, clip
        self.gamma, self.world, self.options = gamma, world, {**START, **options}
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        raise NotImplementedError


class ByScript(Loop):
    """What is asked of a loop whose script owns the model, the optimizer and the schedule."""

    net: Any
    optimizer: Any
    scheduler: Any

    def skipped(self) -> int:
        return preamp.engine_of(self.net).steps_skipped

    def rate(self) -> float:
        preamp.step_scheduler(self.scheduler, self.optimizer)
        return self.scheduler.get_last_lr()[0]


class Contract:
    """A test class of a framework derives from this, and says its ``Loop``.

    That trains a `Net`, its ``net``, as the framework's documentation has it, and notes the
    ``losses``: ``run(data, factor)`` on all batches. ``save(path)`` and ``load(path)`` are the
    framework's own, ``state()`` is what it saves of the engine, and ``skipped()`` and ``rate()``
    are asked after a run.
    """

    Loop: ClassVar[Any]
    clip: ClassVar[float | None] = 0.5
    clip_by_hand: ClassVar[float | None] = 0.5
    """Norms that gradients are clipped to, and where that has a loop by hand's numbers."""

    @pytest.mark.parametrize("every", [1, 2])
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_run_is_that_of_a_loop_by_hand(self, level: str, every: int, tmp_path: Path) -> None:
        data = batches(12)
        run = self.Loop(level, tmp_path, every=every, clip=self.clip_by_hand).run(data)
        hand = ByHand(level).run(data, every=every, clip=self.clip_by_hand)
        assert run.losses == hand.losses
        assert_same_models(run.net, hand.model)

    @pytest.mark.parametrize("level", LEVELS)
    def test_losses_are_those_of_a_float32_run(self, level: str, tmp_path: Path) -> None:
        data = batches(30)
        run = self.Loop(level, tmp_path, clip=self.clip, **without_skips(level)).run(data)
        wanted = plain_losses(data, self.clip or 1e9)
        assert wanted[-1] < 0.5 * wanted[0]
        assert run.losses == near(wanted, level)

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_resumed_run_goes_on_to_the_bit(self, level: str, tmp_path: Path) -> None:
        data = batches(12)
        run = self.Loop(level, tmp_path, clip=self.clip).run(data[:6])
        run.save(tmp_path / "file")
        run.run(data[6:])
        again = self.Loop(level, tmp_path, clip=self.clip)
        with torch.no_grad():
            for param in again.net.parameters():
                param.zero_()
        again.load(tmp_path / "file")
        again.run(data[6:])
        assert again.losses == run.losses[6:]
        assert_same_models(again.net, run.net)
        assert again.state() == run.state()

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_skipped_step_changes_nothing_and_a_schedule_waits(
        self, level: str, tmp_path: Path
    ) -> None:
        run = self.Loop(level, tmp_path, gamma=0.5, clip=self.clip, max_loss_scale=2.0**24)
        before = exact(run.net)
        run.run(batches(1), factor=1e30)
        for name, value in exact(run.net).items():
            assert_same(value, before[name])
        assert run.skipped() == 1
        assert run.rate() == 0.02

    def test_off_it_is_a_float32_run(self, tmp_path: Path) -> None:
        data = batches(6)
        run = self.Loop("O2", tmp_path, clip=self.clip, enabled=False).run(data)
        assert run.losses == plain_losses(data, self.clip or 1e9)

    def test_two_processes_train_one_model(self, tmp_path: Path) -> None:
        def train(rank: int) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for level in ("O1", "O2"):
                run = self.Loop(level, Path(), every=2, clip=self.clip, world=2)
                run.run(batches(8, seed=rank))
                found[level] = list(bits(exact(run.net).values()))
                if preamp.engine.find_engine(run.net) is not None:
                    preamp.engine_of(run.net).close()
            return found

        first, second = fork_ranks(train, tmp_path)
        assert first == second
        alone = ByHand("O2").run(batches(8), every=2, clip=self.clip)
        assert list(bits(exact(alone.model).values())) != first["O2"]
        assert list(bits(exact(Net()).values())) != first["O2"]
