# SPDX-License-Identifier: BSD-3-Clause
"""A small model really trained, and everything about it recorded."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import preamp
from preamp.numerics import (
    FORMATS,
    History,
    NumberFormat,
    NumericsRecord,
    OverflowRecord,
    RunRecord,
    StepRecord,
    TensorStatistics,
    measure,
)

LAYERS = 7
WIDTH = 24


def train(
    level: str = "O2",
    *,
    steps: int = 60,
    look_every: int = 3,
    loss_scale: float = 2.0**24,
    name_of: Callable[[str], str] = str,
) -> History:
    """Train a sigmoid network, whose early layers get tiny gradients, from too high a loss scale.

    Args:
        level: Opt level.
        steps: How many.
        look_every: How often tensors are measured.
        loss_scale: What dynamic scaling starts from, where the level scales.
        name_of: Renames parameters.
    """
    torch.manual_seed(0)
    widths = [16] + [WIDTH] * LAYERS
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Sigmoid()) for a, b in pairwise(widths)]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        state = preamp.engine_of(optimizer).state_dict()
        state["loss_scaler0"]["loss_scale"] = loss_scale
        preamp.engine_of(optimizer).load_state_dict(state)
    history = History()
    names = {name: name_of(name) for name, _ in model.named_parameters()}
    history.add(_start(level, engine, model, names))
    inputs = torch.randn(64, 16)
    targets = (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()
    for step in range(1, steps + 1):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        scale = engine.loss_scale(0)
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()  # pyright: ignore[reportUnknownMemberType]
            looks = step % look_every == 1
            seen = _gradients(model, names, scale, engine) if looks else []
        before = {n: (p.detach().clone(), p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        seen += _weights(model, names, before, engine) if looks else []
        optimizer.zero_grad()
        history.add(_step(step, loss.item(), engine))
        if engine.last_step_skipped:
            history.add(_cause(step, engine.overflow_causes[-1], names))
        if seen:
            history.add(NumericsRecord(step=step, loss_id=0, tensors=seen))
    engine.close()
    return history


def _start(level: str, engine: preamp.Engine, model: nn.Module, names: dict[str, str]) -> RunRecord:
    policy = engine.policy
    fields = ("opt_level", "loss_scale", "min_loss_scale", "max_loss_scale", "master_weights")
    return RunRecord(
        preamp=preamp.__version__,
        torch=torch.__version__,
        device="cpu",
        opt_level=level,
        policy={name: str(getattr(policy, name)) for name in fields},
        parameters={names[n]: p.numel() for n, p in model.named_parameters()},
        dtypes={names[n]: str(p.dtype) for n, p in model.named_parameters()},
        started="2026-01-02T03:04:05+00:00",
    )


def _step(step: int, loss: float, engine: preamp.Engine) -> StepRecord:
    return StepRecord(
        step=step,
        losses={0: loss},
        scales={0: engine.loss_scale(0)},
        skipped=engine.last_step_skipped,
        lr=3e-3,
    )


def _gradients(
    model: nn.Module, names: dict[str, str], scale: float, engine: preamp.Engine
) -> list[TensorStatistics]:
    return [
        measure([p.grad])[0].read(
            names[name], "gradient", _form(engine), scale=scale, with_histogram=True
        )
        for name, p in model.named_parameters()
        if p.grad is not None
    ]


def _weights(
    model: nn.Module,
    names: dict[str, str],
    before: dict[str, tuple[torch.Tensor, torch.Tensor | None]],
    engine: preamp.Engine,
) -> list[TensorStatistics]:
    found: list[TensorStatistics] = []
    for name, param in model.named_parameters():
        old, grad = before[name]
        if param.dtype is not torch.float32 and grad is not None:
            stalled = int(((param.detach() == old) & (grad != 0)).sum())
            found.append(
                measure([param])[0].read(names[name], "weight", _form(engine), stalled=stalled)
            )
    return found


def _form(engine: preamp.Engine) -> NumberFormat:
    return FORMATS[str(engine.policy.half_dtype or torch.float16).removeprefix("torch.")]


def _cause(step: int, cause: Any, names: dict[str, str]) -> OverflowRecord:
    return OverflowRecord(
        step=step,
        loss_id=cause.loss_id,
        parameters=[names[name] for name in cause.parameters],
        loss_was_finite=cause.loss_was_finite,
        old_scale=cause.old_scale,
        new_scale=cause.new_scale,
    )
