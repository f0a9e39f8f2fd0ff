# SPDX-License-Identifier: BSD-3-Clause
"""The training that `soak` lets run: its steps, its objects, and what it holds in memory."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import preamp
from preamp.checkpoint import latest_checkpoint
from preamp.numerics.records import OverflowRecord
from preamp.optimizers import FusedAdam
from preamp.scaling import DynamicScale

BLOCKS = ((2,), (0, 1), (1, 0), (2, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1), (1, 0, 1))
"""Which losses a step has, in their order: 0 is the net's, 1 the lattice's, 2 both models'."""

MEMBERS = ((0,), (1,), (0, 1))
POISONED = 0.02  # of the backwards
SCALE = DynamicScale(init_scale=2.0**8, growth_interval=16, min_scale=1.0, max_scale=2.0**8)
SIZE, UNIT, MAX_NORM = 16, 16.0, 16.0  # the lattice's gradient has a norm of 64
FINAL = "final.safetensors"
SAVED, RELOADED = 0.05, 0.025  # of the steps
FROZEN_AT = 20
RECORD_OBJECTS = 4  # of a skipped step: the record and three lists


@dataclass(frozen=True, slots=True)
class Step:
    """What happens in a step.

    Attributes:
        losses: Of its backwards.
        poisoned: Which of them overflow.
        signs: Of the lattice's inputs, one for each element and one for each backward.
        clips: Whether the optimizers clip.
        saves: Whether it saves at its end.
        reloads: Whether new objects then load the file.
        in_background: How it saves.
    """

    losses: tuple[int, ...]
    poisoned: tuple[bool, ...]
    signs: tuple[list[float], tuple[float, ...]]
    clips: tuple[bool, bool]
    saves: bool
    reloads: bool
    in_background: bool

    @classmethod
    def of(cls, seed: int, number: int) -> Step:
        """The step with this number."""
        draw = random.Random(seed << 32 | number)
        losses = draw.choice(BLOCKS)
        return cls(
            losses=losses,
            poisoned=tuple(draw.random() < POISONED for _ in losses),
            signs=(draw.choices((-1.0, 1.0), k=SIZE), tuple(draw.choices((-1.0, 1.0), k=3))),
            clips=(draw.random() < 0.5, draw.random() < 0.5),
            saves=draw.random() < SAVED,
            reloads=draw.random() < RELOADED / SAVED,
            in_background=draw.random() < 0.5,
        )

    def skipped(self, model: int) -> bool:
        """Whether the optimizer of ``model`` skips it."""
        backwards = zip(self.losses, self.poisoned, strict=True)
        return any(poisoned and model in MEMBERS[loss] for loss, poisoned in backwards)


class Lattice(nn.Module):
    """Its gradient is what goes in, so that sums of powers of two stay exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE) + torch.arange(SIZE) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return each element times its input."""
        return self.weight * x


def lattice_lr(level: str) -> float:
    """A learning rate whose updates of the lattice are exact; far below what float16 resolves."""
    return 2.0**-10 if level == "O3" else 2.0**-20


@dataclass(frozen=True, slots=True)
class Options:
    """What is run.

    Attributes:
        level: The opt level.
        steps: How many.
        seed: Of everything.
    """

    level: str
    steps: int
    seed: int


class Run:
    """The objects of a training script."""

    def __init__(self, options: Options, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        net = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, 1)
        )
        self.models: list[nn.Module] = [net, Lattice()]
        self.optimizers: list[torch.optim.Optimizer] = [
            FusedAdam(net.parameters(), lr=0.01, eps=1e-4),
            torch.optim.SGD(self.models[1].parameters(), lr=lattice_lr(options.level)),
        ]
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
            self.optimizers[0], T_0=50
        )
        preamp.initialize(
            self.models,
            self.optimizers,
            opt_level=options.level,
            loss_scale="dynamic",
            num_losses=len(MEMBERS),
            min_loss_scale=SCALE.min_scale,
            max_loss_scale=SCALE.max_scale,
            verbosity=0,
        )
        self.engine = preamp.engine_of(self.models[0])
        for scaler in self.engine.scalers:
            scaler.rule = SCALE

    def backwards(self, step: Step) -> None:
        """Fill the gradients."""
        signs = torch.tensor(step.signs[0])
        for block, loss_id in enumerate(step.losses):
            parts: list[torch.Tensor] = []
            if 0 in MEMBERS[loss_id]:
                x = torch.randn(4, 8) + random.random()
                parts.append((self.models[0](x).float().sum(1) - x.sum(1)).square().mean())
            if 1 in MEMBERS[loss_id]:
                parts.append(self.models[1](signs * (UNIT * step.signs[1][block])).float().sum())
            optimizers = [self.optimizers[model] for model in MEMBERS[loss_id]]
            with preamp.scale_loss(sum(parts), optimizers, loss_id=loss_id) as scaled:
                poison = float("inf") if step.poisoned[block] else 1.0
                (scaled * poison).backward()

    def update(self, step: Step) -> None:
        """Let the optimizers step."""
        for optimizer, clips in zip(self.optimizers, step.clips, strict=True):
            if clips:
                preamp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
            if optimizer is self.optimizers[0]:
                preamp.step_scheduler(self.scheduler, optimizer)
            optimizer.zero_grad()

    def save(self, path: Path, extra: Any, **options: Any) -> None:
        """Save all of it."""
        preamp.save_checkpoint(path, self.models, self.optimizers, self.scheduler, extra, **options)

    def load(self, path: Path) -> Any:
        """Load all of it; return ``extra``."""
        return preamp.load_checkpoint(path, self.models, self.optimizers, self.scheduler)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds at some step."""

    step: int
    rss: int
    tensors: int
    objects: int
    files: int
    threads: int

    @classmethod
    def now(cls, step: int, run: Run) -> Memory:
        """Count after a collection, without what was there before ``gc.freeze``.

        An engine keeps the records of its latest 100,000 skipped steps, which are left out, too.
        """
        gc.collect()
        found = gc.get_objects()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = sum(issubclass(type(one), torch.Tensor) for one in found)
        kept = RECORD_OBJECTS * len(run.engine.history.of(OverflowRecord))
        files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        return cls(step, rss, tensors, len(found) - kept, files, threads)


def train(
    options: Options,
    folder: Path,
    *,
    checkpoints: bool,
    reloads: bool,
    report: Callable[[str], object],
) -> None:
    """Train to the end, from the newest checkpoint in ``folder`` if there is one."""
    run = Run(options, options.seed)
    newest = latest_checkpoint(folder) if checkpoints else None
    first = 0 if newest is None else run.load(newest)
    every = max(options.steps // 30, 1)
    for number in range(first, options.steps):
        step = Step.of(options.seed, number)
        run.backwards(step)
        run.update(step)
        if step.saves and checkpoints:
            path = folder / f"step_{number + 1}.safetensors"
            report("saving")
            run.save(path, number + 1, keep_last=2, asynchronous=step.in_background)
            if reloads and step.reloads:
                run.engine.close()
                run = Run(options, seed=-1)
                if run.load(path) != number + 1:
                    raise SystemExit(f"{path} is of another step than {number + 1}")
        report(f"step {number}")
        if number == FROZEN_AT and gc.get_freeze_count():  # in a process of our own
            gc.collect()
            gc.freeze()  # what is there now is not counted, nor walked again and again
        if number % every == every - 1 and Path("/proc/self/statm").exists():
            now = Memory.now(number + 1, run)
            report(f"memory {' '.join(map(str, astuple(now)))}")
    run.save(folder / FINAL, None)
