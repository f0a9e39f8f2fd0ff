# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts of the planner against what training at each level shows."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

import preamp
from insight.plan_cases import CASES, Training
from insight.score import Score
from preamp.core.randomness import untouched_random
from preamp.planning.planner import POLICIES
from preamp.planning.records import PlanReport

STEPS = 80
ENOUGH, CLEAR = 0.8, 0.9  # shares of float32's progress: less fails, more trains, between is open
_LEARNED = 1e-6  # share by which float32 has to bring a part down for that to count as learning
_SETTLING = 5  # first steps in which a dynamic scale may still overflow


@dataclass(frozen=True, slots=True)
class Outcome:
    """A training at one level."""

    start: tuple[float, ...]  # the parts of the loss before, whatever they are weighted with
    progress: tuple[float, ...]  # how far each of them sank
    is_finite: bool  # whether all weights, buffers and losses were


def judged(training: Training, model: Any, batch: Any) -> list[float]:
    """The parts of the loss in float64, or in float32 where the model mixes that in."""
    with untouched_random():
        try:
            wide = [t.double() if t.is_floating_point() else t for t in batch]
            parts = training.parts(copy.deepcopy(model).double(), wide)
        except RuntimeError:
            parts = training.parts(copy.deepcopy(model), batch)
        return [float(part.detach()) for part in parts]


def train(training: Training, level: str, scale: float) -> Outcome | None:
    """Train at a level as a user would; ``None`` if something raises."""
    model, loss_fn, batch, optimizer = training.make()
    policy = POLICIES.get(level, preamp.OPT_LEVELS["O0"])
    start = copy.deepcopy(model)
    if policy.cast_model_type is not None and not policy.master_weights:
        start = start.to(policy.cast_model_type).float()  # what it really starts from
    before = judged(training, start, batch)
    changes: dict[str, Any] = {} if level in preamp.OPT_LEVELS else {"master_weights": False}
    losses: list[float] = []
    try:
        preamp.initialize(model, optimizer, opt_level=policy.opt_level, verbosity=0, **changes)
        engine = preamp.engine_of(optimizer)
        if policy.half_dtype is torch.float16:
            engine.scaler(0).set_scale(scale)
        for _ in range(STEPS):
            loss = loss_fn(model, batch)
            losses.append(float(loss.item()))
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        after = judged(training, model, batch)
    except Exception:  # however a level fails, it does not train
        return None
    state = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    is_finite = all(map(math.isfinite, losses[_SETTLING:]))
    is_finite = is_finite and all(bool(torch.isfinite(t).all()) for t in state)
    progress = tuple(a - b for a, b in zip(before, after, strict=True))
    return Outcome(tuple(before), progress, is_finite)


def trains(level: Outcome | None, expected: Outcome) -> bool | None:
    """Whether every part of the loss sinks as in float32.

    ``None`` in the band between, and where float32 learns nothing itself.
    """
    if level is None or not level.is_finite:
        return False
    parts = zip(level.progress, expected.progress, expected.start, strict=True)
    shares = [a / b for a, b, start in parts if b > _LEARNED * abs(start)]
    worst = min(shares, default=1.0)
    return None if not shares or ENOUGH <= worst < CLEAR else worst >= CLEAR


def truth_of(training: Training, report: PlanReport, expected: Outcome) -> dict[str, bool | None]:
    """Which levels train as ``expected`` of float32, at the scales that the plan gives them."""
    found = {
        name: trains(train(training, name, plan.loss_scale), expected)
        for name, plan in report.levels.items()
    }
    return {"O0": True, **found}


def scores(every: int, offset: int, **options: Any) -> list[Score]:
    """Plan the cases, train them at every level, and compare."""
    verdicts, advice = Score("plan, verdicts"), Score("plan, recommended levels")
    for name in list(CASES)[offset::every]:
        expected = train(CASES[name], "O0", 1.0)
        if expected is None or not expected.is_finite:
            continue  # drawn ones may diverge
        report = preamp.plan(*CASES[name].make(), **options)
        truth = truth_of(CASES[name], report, expected)
        for level, plan in report.levels.items():
            if truth[level] == plan.fits:
                verdicts.right += 1
            elif truth[level] is not None:
                why = plan.problems[0].text if plan.problems else "fits"
                verdicts.wrong.append(f"{name}, {level}: {why}")
        if truth[report.recommended] is False:
            advice.wrong.append(f"{name}: {report.recommended}")
        else:
            advice.right += 1
    return [verdicts, advice]
