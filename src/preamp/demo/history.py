# SPDX-License-Identifier: BSD-3-Clause
"""What happened to the numbers of one training, as records that the report reads."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import preamp
from preamp.demo.records import Memory
from preamp.numerics import (
    CastsRecord,
    History,
    MemoryRecord,
    NumericsRecord,
    Record,
    RunRecord,
    StepRecord,
)


def note_start(history: History, engine: preamp.Engine, device: str) -> None:
    """Write down how a training is set up; ``device`` is in words."""
    for record in engine.history.of(RunRecord):
        history.add(dataclasses.replace(record, device=device))


def note_step(history: History, step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
    """Write down step ``step``, counted from 1, its loss in bits per byte, and why it was skipped.

    Synchronises: waits until it is known whether the step was skipped.
    """
    engine = preamp.engine_of(optimizer)
    skipped = engine.last_step_skipped
    rate = optimizer.param_groups[0]["lr"]
    scales = {0: engine.loss_scale(0)}
    history.add(StepRecord(step=step, losses={0: loss}, scales=scales, skipped=skipped, lr=rate))
    if skipped and engine.overflow_causes:
        history.add(dataclasses.replace(engine.overflow_causes[-1].to_record(), step=step))


def note_memory(history: History, step: int, memory: Memory, model: nn.Module) -> None:
    """Write down what is held, given as bytes per parameter."""
    count = sum(p.numel() for p in model.parameters())
    held = {
        name.replace("_", " "): round(part * count)
        for name, part in dataclasses.asdict(memory).items()
    }
    history.add(MemoryRecord(step=step, categories=held))


def records_of(history: History, engine: preamp.Engine) -> tuple[Record, ...]:
    """All records of a training, with those that its engine kept; before the engine is closed."""
    return (*history, *_kept_by(engine))


def _kept_by(engine: preamp.Engine) -> tuple[Record, ...]:
    """Return what the engine itself has recorded about tensors and casts.

    Steps, overflows and memory the loop has written down already, in its own units.
    """
    history = engine.history
    return (*history.of(NumericsRecord), *history.of(CastsRecord))
