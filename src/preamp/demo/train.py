# SPDX-License-Identifier: BSD-3-Clause
"""The training loop: an ordinary PyTorch loop, preamp's few lines in it, and what it records."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

import preamp
from preamp.demo.config import DemoConfig, OptimizerConfig
from preamp.demo.data import Batch
from preamp.demo.measure import loss_of, memory_of
from preamp.demo.model import GPT
from preamp.demo.records import LevelResult, Memory
from preamp.distributed.groups import mean_over_ranks
from preamp.numerics import (
    CastsRecord,
    History,
    MemoryRecord,
    NumericsRecord,
    Record,
    RunRecord,
    StepRecord,
)
from preamp.optim.fused.adam import FusedAdam


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One finished step."""

    level: str  # the opt level in training
    step: int  # steps done, this one included
    loss: float  # training loss in bits per byte
    loss_scale: float  # the scale of the next step
    tokens_per_second: float  # speed of this step


class Watcher:
    """Is told how far a run is, and does nothing with it; a progress display does."""

    def level_started(self, level: str) -> None:
        """An opt level begins."""

    def step_done(self, progress: Progress) -> None:
        """A step is over."""

    def level_done(self, result: LevelResult) -> None:
        """An opt level is over, finished or not."""


PATIENCE = 5
"""Losses in a row that may be non-finite: a loss scaler recovers from one, no model from five."""


class DivergedError(RuntimeError):
    """The training loss stopped being a number."""


@dataclass(slots=True, kw_only=True)
class Tape:
    """What the loop has measured so far; it survives an exception in the loop."""

    level: str  # the opt level in training
    losses: list[float] = field(default_factory=list[float])  # bits per byte of each step
    seconds: list[float] = field(default_factory=list[float])  # duration of each step
    memory: Memory | None = None  # bytes per parameter, from the second step that was taken on
    history: History = field(default_factory=History)  # what happened to the numbers

    def begin(self, engine: preamp.Engine, device: str) -> None:
        """Write down how a training is set up; ``device`` is in words."""
        for record in engine.history.of(RunRecord):
            self.history.add(replace(record, device=device))

    def count_bytes_once(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count memory at the first backward after a step that made the optimizer's state."""
        # Released gradients are applied, and make state, within the first backward already.
        if self.memory is None and self.losses and optimizer.state:
            self.memory = memory_of(model, optimizer)
            count = sum(p.numel() for p in model.parameters())
            held = {
                name.replace("_", " "): round(part * count)
                for name, part in asdict(self.memory).items()
            }
            self.history.add(MemoryRecord(step=len(self.losses) + 1, categories=held))

    def note(self, nats: float, optimizer: torch.optim.Optimizer) -> None:
        """Add a step to the history, and why it was skipped. Synchronises."""
        engine, step = preamp.engine_of(optimizer), len(self.losses) + 1
        skipped = engine.last_step_skipped
        self.history.add(
            StepRecord(
                step=step,
                losses={0: nats / math.log(2)},
                scales={0: engine.loss_scale(0)},
                skipped=skipped,
                lr=optimizer.param_groups[0]["lr"],
            )
        )
        if skipped and engine.overflow_causes:
            self.history.add(replace(engine.overflow_causes[-1].to_record(), step=step))

    def add(self, nats: float, seconds: float) -> None:
        """Keep loss and time of a step; `DivergedError` at one non-finite loss too many."""
        self.losses.append(nats / math.log(2))
        self.seconds.append(seconds)
        latest = self.losses[-PATIENCE:]
        if len(latest) == PATIENCE and not any(map(math.isfinite, latest)):
            first = len(self.losses) - PATIENCE + 1
            raise DivergedError(f"the loss is not finite from step {first} on")

    def records(self, engine: preamp.Engine) -> tuple[Record, ...]:
        """All records of a training; those of steps are its own, in bits per byte."""
        own = engine.history
        return (*self.history, *own.of(NumericsRecord), *own.of(CastsRecord))


def make_optimizer(
    model: GPT, config: OptimizerConfig, *, is_fused: bool = False
) -> torch.optim.Optimizer:
    """Create the optimizer as if there were no mixed precision; moments in fewer bits are ours."""
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if is_fused:
        return FusedAdam(model.parameters(), **options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    config: DemoConfig,
    *,
    tape: Tape,
    watcher: Watcher,
) -> None:
    """Train a model, wrapped where ranks share the work, at whatever level `initialize` gave it.

    ``batches`` are this rank's; measurements go to ``tape``. Synchronises once per step, because
    the step is timed and its loss is shown. Raises `DivergedError` if the loss was not finite too
    often, and `preamp.LossScaleError` if the loss scaler gave up.
    """
    model.train()
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        set_learning_rate(optimizer, step, config)

        loss = loss_of(model, batch)
        with preamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # pyright: ignore[reportUnknownMemberType]
        if not config.kept.applies_at_once:
            preamp.clip_grad_norm_(optimizer, config.optimizer.max_norm)
        tape.count_bytes_once(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

        wait_for(loss.device)
        seconds = time.perf_counter() - started
        nats = mean_over_ranks(loss).item()
        tape.note(nats, optimizer)
        tape.add(nats, seconds)
        watcher.step_done(
            Progress(
                level=tape.level,
                step=len(tape.losses),
                loss=tape.losses[-1],
                loss_scale=preamp.engine_of(optimizer).loss_scale(0),
                tokens_per_second=config.batch * config.model.context / seconds,
            )
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: DemoConfig) -> None:
    """Set the rate after ``step`` steps: a linear warm-up, then half a cosine."""
    settings = config.optimizer
    warmup = max(1, round(settings.warmup_fraction * config.steps))
    progress = min(1.0, max(0.0, (step - warmup) / max(1, config.steps - warmup)))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    fraction = settings.final_fraction + (1 - settings.final_fraction) * cosine
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * min((step + 1) / warmup, fraction)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all it was told to do; the CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
