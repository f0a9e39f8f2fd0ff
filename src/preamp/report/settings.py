# SPDX-License-Identifier: BSD-3-Clause
"""Findings on options of an optimizer, and on steps that change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from preamp.numerics import StepRecord
from preamp.report import words
from preamp.report.finding import Finding
from preamp.report.gather import Run, gradients_of
from preamp.report.losses import finite_of

DECAY: Final = 0.05  # part of each weight that a step may take off
USUAL_DECAY: Final = 1e-3  # part that is still usual, far above most settings
NO_RATE: Final = 1e-4  # part of the highest learning rate at which next to nothing is learnt
STAYS: Final = 0.01  # part of a loss that it moves by where nothing is learnt
STAYS_STEPS: Final = 100  # losses from which that is told of
SLOWER: Final = 10.0  # times less than gradients promise that a loss falls

_DECAYED: Final = frozenset({"SGD", "AdamW", "FusedSGD", "FusedLion", "Lion"})
"""Classes that take ``lr * weight_decay`` off each weight."""


def _by_optimizer(run: Run) -> Iterator[tuple[dict[str, str], list[StepRecord]]]:
    """The options of each optimizer, and its steps that say their learning rate."""
    options = run.start.optimizers if run.start else []
    for steps, _ in run.by_optimizer():
        if 0 <= steps[0].optimizer < len(options):  # a file may hold any number
            yield options[steps[0].optimizer], [step for step in steps if step.lr is not None]


def _number(options: dict[str, str], name: str) -> float:
    try:
        return float(options.get(name, 0))
    except ValueError:
        return math.nan


def _went(run: Run) -> str:
    finite = finite_of(run.first_losses)
    if not finite:
        return ""
    first, last = (words.magnitude(y) for _, y in (finite[0], finite[-1]))
    return f" The loss went from {first} to {last}."


def _has_learnt(run: Run) -> bool:
    losses = [loss for _, loss in run.first_losses]
    return len(losses) > 1 and all(map(math.isfinite, losses)) and losses[-1] < 0.5 * losses[0]


def decay_too_large(run: Run) -> Iterator[Finding]:
    """Yield optimizers whose decay takes so much of all weights that they cannot learn."""
    for options, steps in _by_optimizer(run):
        decay, name = _number(options, "weight_decay"), options.get("class", "")
        is_off = name in _DECAYED or options.get("decoupled_weight_decay") == "True"
        large = [s for s in steps if is_off and (s.lr or 0.0) * decay >= DECAY]
        most = max(large, key=lambda step: step.lr or 0.0, default=None)
        # What learns all the same is no fault, unless weights change their sign in each step.
        if most is not None and ((most.lr or 0.0) * decay > 1 or not _has_learnt(run)):
            part, rate = (most.lr or 0.0) * decay, most.lr or 0.0
            takes = f"takes {words.share(part)} off each weight"
            if part > 1:
                takes = f"multiplies each weight by {words.magnitude(1 - part)}"
            yield Finding(
                id="decay-too-large",
                title=f"The weight decay of {words.shown(name, 40)} is too large",
                number=f"{words.magnitude(decay)} times a learning rate of {words.magnitude(rate)}"
                f" {takes} at each step.{_went(run)}",
                do=f"Lower it: {words.magnitude(USUAL_DECAY / rate)} or less takes a thousandth of"
                " a weight per step at this rate.",
                step=large[0].step,
                where=f"weight_decay of {words.shown(name, 40)}",
                is_grave=part >= 1,
            )


def momentum_is_one(run: Run) -> Iterator[Finding]:
    """Yield optimizers that never forget a gradient."""
    for options, steps in _by_optimizer(run):
        momentum = _number(options, "momentum")
        if steps and momentum >= 1:
            name = words.shown(options.get("class", "the optimizer"), 40)
            yield Finding(
                id="momentum-is-one",
                title=f"The momentum of {name} is {words.magnitude(momentum)}",
                number="Every gradient stays in the sum that weights move by, and none is ever"
                f" forgotten, so the loss swings or grows.{_went(run)}",
                do="Pass 0.9 or 0.99; the learning rate may have to change with it.",
                step=steps[0].step,
                where=f"momentum of {name}",
            )


def rate_vanishes(run: Run) -> Iterator[Finding]:
    """Yield schedules that end most of a run at next to nothing before anything was learnt."""
    for options, steps in _by_optimizer(run):
        rates = [(step.step, step.lr or 0.0) for step in steps]
        highest = max((rate for _, rate in rates), default=0.0)
        high = [i for i, (_, rate) in enumerate(rates, 1) if rate > NO_RATE * highest]
        last = high[-1] if high else 0
        rest = rates[last:]
        if last and len(rest) >= max(STAYS_STEPS, last + 1) and not _has_learnt(run):
            since, rate = rest[0]
            yield Finding(
                id="rate-vanishes",
                title="The learning rate falls to next to nothing",
                number=f"It was {words.magnitude(highest)} at most, and is {words.magnitude(rate)}"
                f" or less in the last {len(rest):,} of {words.counted(len(rates), 'step')}."
                f"{_went(run)}",
                do="Look at the schedule: it may count epochs and be stepped for each batch, or be"
                " made for fewer steps.",
                step=since,
                where=f"learning rate of {words.shown(options.get('class', ''), 40)}",
            )


def loss_stays(run: Run) -> Iterator[Finding]:
    """Yield a loss that all steps leave where it began: to a hundredth, so on the same data."""
    for name, row in run.losses().items():
        values = [y for _, y in finite_of(row)]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        size = max(abs(low), abs(high))
        if len(values) < STAYS_STEPS or len(values) < len(row) or not 0 < size:
            continue
        if high - low < STAYS * size and any(not step.skipped for step in run.steps):
            norm, do = _push(run, values[0] - low)
            yield Finding(
                id="loss-stays",
                title="The loss stays where it began",
                number=f"Loss {name} lies between {words.magnitude(low)} and"
                f" {words.magnitude(high)} in all of {words.counted(len(values), 'step')}.{norm}",
                do=do,
                step=int(row[0][0]),
                where=f"loss {name}",
            )


def _push(run: Run, fell: float) -> tuple[str, str]:
    """What the gradients promise, which plain steps would have kept, and what to do."""
    norms = {step.step: step.norm for step in run.steps if step.norm}
    for record in run.numerics:
        if record.step not in norms:
            squares = (t.elements * (t.rms / t.scale) ** 2 for t in gradients_of([record]))
            norms[record.step] = math.sqrt(sum(squares))
    decayed = [o for o, _ in _by_optimizer(run) if _number(o, "weight_decay") > DECAY]
    other = f"the weight decay is {decayed[0]['weight_decay']}, so lower it" if decayed else ""
    if not norms:
        first = f"First, {other}. Then look" if other else "Look"
        return "", f"{first} at the learning rate, at clipping, and at what is trained."
    norm = sum(norms.values()) / len(norms)
    rates = [step.lr or 0.0 for step in run.steps if not step.skipped]
    promised = sum(rates) * norm * norm  # of a descent along the gradient, to first order
    told = f" The norm of the gradients is {words.magnitude(norm)}."
    is_plain = all(o.get("class", "").endswith("SGD") for o, _ in _by_optimizer(run))
    is_clipped = any(step.norm for step in run.steps)
    if other:
        return told, f"First, {other}. Then look at the learning rate."
    if is_plain and promised > SLOWER * fell and promised > STAYS * norm:
        told += (
            f" Steps along them would have lowered the loss by about {words.magnitude(promised)}."
        )
        if is_clipped:
            return told, "Raise the norm that gradients are clipped to: it is far too small."
        return told, (
            "Look at whether the optimizer has the parameters of this model, and at what else"
            " changes them or their gradients."
        )
    clip = ", raise the norm that gradients are clipped to" if is_clipped else ""
    return told, f"Raise the learning rate{clip}, or look at what the loss is divided by."
