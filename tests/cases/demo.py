# SPDX-License-Identifier: BSD-3-Clause
"""A demo small enough for a test, and a run of it made up by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from preamp.demo.config import SMALL, DemoConfig
from preamp.demo.data import Corpus
from preamp.demo.records import DemoResult, Dtypes, LevelResult, Memory
from preamp.numerics import Record, StepRecord

MODEL = SMALL

TEXT = torch.arange(4000, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)

CORPUS = Corpus(train=TEXT, held_out=TEXT[:1000])


def config(*levels: str, steps: int = 6) -> DemoConfig:
    return DemoConfig(levels=levels, steps=steps, batch=2, held_out_windows=8, model=MODEL)


def row(level: str = "O0", **changes: object) -> LevelResult:
    made = LevelResult(
        level=level,
        status="finished",
        reason="",
        steps_done=4,
        steps_skipped=1,
        loss_scale=65536.0,
        losses=(8.0, 7.0, 6.0, 5.0),
        step_seconds=(0.9, 0.2, 0.4, 0.3),
        warmup_steps=1,
        tokens_per_step=60,
        held_out_bits=5.0,
        dtypes=Dtypes(weights="fp16", compute="fp16", masters="fp32"),
        memory=Memory(weights=2.0, masters=4.0, gradients=2.0, optimizer_state=8.0),
        activation_bytes=2**20,
        peak_bytes=None,
    )
    changed = replace(made, **changes)
    return replace(changed, records=changed.records or records(changed.losses))


def records(losses: tuple[float, ...]) -> tuple[Record, ...]:
    return tuple(
        StepRecord(step=step, losses={0: loss}, scales={0: 65536.0}, skipped=False)
        for step, loss in enumerate(losses, 1)
    )


def result(*rows: LevelResult, interrupted: bool = False) -> DemoResult:
    return DemoResult(
        config=config(*[row.level for row in rows] or ["O0"]),
        versions={"python": "3.11", "torch": "2.13", "preamp": "0.1"},
        device="cpu",
        parameters=10,
        train_bytes=4000,
        held_out_bytes=1000,
        interrupted=interrupted,
        levels=rows,
    )
