# SPDX-License-Identifier: BSD-3-Clause
"""Loss and loss scale by step, of one run or of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from preamp.report import words
from preamp.report.blocks import Block, Figure, Missing, Section, Text
from preamp.report.chart import (
    Chart,
    Line,
    Marks,
    Point,
    Scale,
    decades,
    draw,
    finite_range,
    linear,
    powers_of_two,
    running_median,
)
from preamp.report.finding import Curve
from preamp.report.gather import Run
from preamp.report.svg import Html

_WIDE_RANGE = 30.0  # losses that differ by more than this factor get a logarithmic scale
_SMOOTHED_FROM = 100  # steps; fewer are seen one by one
_NAMED_STEPS = 12  # skipped steps that a description names one by one


def _by_step(
    runs: Sequence[Run], name: str, title: str, lines: Sequence[Line], y: Scale, **more: Any
) -> Html:
    chart = Chart(
        name=name, title=title, lines=lines, x=step_axis(runs), y=y, x_name="step", **more
    )
    return draw(chart)


def loss_chart(run: Run, name: str, began: Sequence[int] = ()) -> Html | None:
    """Draw a run's losses, skipped steps and non-finite losses marked; ``None`` without any.

    Steps at which something ``began`` are marked as well.
    """
    rows = run.losses()
    y = loss_scale_of([value for points in rows.values() for _, value in points])
    if y is None:
        return None
    lines: list[Line] = []
    for style, (loss_id, points) in enumerate(rows.items()):
        label = f"loss {loss_id}" if len(rows) > 1 else ""
        if len(points) >= _SMOOTHED_FROM:
            lines.append(Line(points=points, style=style, faint=True))
        lines.append(Line(name=label, points=smoothed(points), style=style))
    bad = sorted({x for points in rows.values() for x, loss in points if not math.isfinite(loss)})
    told = [*(_describe_loss(f"Loss {i}", points) for i, points in rows.items()), _skips(run)]
    marks = (_began(began), _skip_marks(run), Marks(name="inf, nan", xs=bad, kind="bad"))
    return _by_step([run], name, "Loss by step", lines, y, description=" ".join(told), marks=marks)


def scale_chart(run: Run, name: str, began: Sequence[int] = ()) -> Html | None:
    """Draw a run's loss scales as powers of two, marked as `loss_chart`; ``None`` without any."""
    rows = run.scales()
    y = power_axis([value for points in rows.values() for _, value in points])
    if y is None:
        return None
    lines = [
        Line(name=f"loss {i}" if len(rows) > 1 else "", points=points, style=style, steps=True)
        for style, (i, points) in enumerate(rows.items())
    ]
    told = " ".join([*(_describe_scale(i, p) for i, p in rows.items()), _skips(run)])
    marks = (_began(began), _skip_marks(run))
    return _by_step(
        [run], name, "Loss scale by step", lines, y, description=told, marks=marks, height=120
    )


def curve_chart(curve: Curve, name: str, began: int) -> Html | None:
    """Draw what a finding rests on by step, and the step at which it ``began``."""
    steps = finite_range(x for x, _ in curve.points)
    ends = (0.0, 1.0) if curve.is_share else finite_range(y for _, y in curve.points)
    if steps is None or ends is None:
        return None
    spell = words.share if curve.is_share else words.magnitude
    (first, last), (start, end) = steps, (curve.points[0][1], curve.points[-1][1])
    chart = Chart(
        name=name,
        title=f"{curve.name}, by step",
        description=f"From {spell(start)} at step {first:,.0f} to {spell(end)} at {last:,.0f}.",
        lines=[Line(points=curve.points)],
        x=linear(first, last, _step_name),
        y=linear(*ends, spell),
        x_name="step",
        marks=[_began([began])],
        height=120,
    )
    return draw(chart)


def loss_comparison(runs: Sequence[Run], name: str) -> Html | None:
    """Draw the first loss of several runs over each other; ``name`` is the prefix of ids."""
    rows = [(run, smoothed(run.first_losses)) for run in runs]
    y = loss_scale_of([value for _, points in rows for _, value in points])
    if y is None:
        return None
    lines = [
        Line(name=words.shown(run.name), points=p, style=i) for i, (run, p) in enumerate(rows) if p
    ]
    told = " ".join(_describe_loss(words.shown(run.name), p) for run, p in rows if p)
    told += " Lines that lie on each other train equally well."
    return _by_step(runs, name, "Loss by step, all runs", lines, y, description=told, height=240)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Take medians over a fortieth of the run; those of a short one stay as they are."""
    if len(points) < _SMOOTHED_FROM:
        return list(points)
    values = running_median([y for _, y in points], max(2, len(points) // 80))
    return [(x, y) for (x, _), y in zip(points, values, strict=True)]


def step_axis(runs: Sequence[Run]) -> Scale:
    """Return the scale of the steps of all runs."""
    low, high = finite_range(s.step for run in runs for s in run.steps) or (0.0, 1.0)
    return linear(low, high, _step_name)


def _step_name(step: float) -> str:
    """Name a step beside its axis, short enough for five of them on a phone."""
    if step != int(step):
        return ""
    return f"{step / 1000:g}k" if step >= 10_000 and step % 1000 == 0 else f"{step:.0f}"


def loss_scale_of(losses: Sequence[float]) -> Scale | None:
    """Return the scale of losses: by their logarithm where they span a wide range."""
    ends = finite_range(losses)
    if ends is None:
        return None
    low, high = ends
    if low > 0 and high / low > _WIDE_RANGE:
        return decades(low, high, words.magnitude)
    pad = (high - low) * 0.04
    return linear(low - pad, high + pad, words.magnitude)


def power_axis(values: Sequence[float]) -> Scale | None:
    """Return the scale of loss scales, or ``None`` if there are none."""
    if not values:
        return None
    return powers_of_two(min(values) / 2, max(values) * 2, words.power, count=4)


def is_smoothed(run: Run) -> bool:
    """Whether the strong lines of a run's losses are running medians."""
    return any(len(points) >= _SMOOTHED_FROM for points in run.losses().values())


def _began(steps: Sequence[int]) -> Marks:
    return Marks(name="began", xs=[step for step in steps if step], kind="began")


def _skip_marks(run: Run) -> Marks:
    return Marks(name="skipped", xs=[step.step for step in run.skipped], kind="skip")


def _skips(run: Run) -> str:
    if not run.skipped:
        return "No step was skipped."
    rows = [([s.step for s in steps if s.skipped], whose) for steps, whose in run.by_optimizer()]
    return " ".join(_skipped(numbers, whose) for numbers, whose in rows if numbers)


def _skipped(steps: Sequence[int], whose: str) -> str:
    if len(steps) > _NAMED_STEPS:
        return f"{len(steps):,} steps{whose} were skipped, from {steps[0]:,} to {steps[-1]:,}."
    numbers = ", ".join(f"{step:,}" for step in steps)
    return f"Skipped: {'step' if len(steps) == 1 else 'steps'} {numbers}{whose}."


def _describe_loss(name: str, points: Sequence[Point]) -> str:
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return f"{name} was never finite."
    (first, start), (last, end) = finite[0], finite[-1]
    return (
        f"{name} goes from {words.magnitude(start)} at step {first:,.0f} to"
        f" {words.magnitude(end)} at step {last:,.0f}."
    )


def _describe_scale(loss_id: str, points: Sequence[Point]) -> str:
    values = [y for _, y in points]
    return (
        f"The loss scale of loss {loss_id} starts at {words.scale(values[0])}, ends at"
        f" {words.scale(values[-1])}, and lies between {words.scale(min(values))} and"
        f" {words.scale(max(values))}."
    )


def timeline_section(run: Run, prefix: str) -> Section:
    """Make the part about losses and their scale; ``prefix`` is of all ids."""
    loss = loss_chart(run, f"{prefix}-loss")
    scale = scale_chart(run, f"{prefix}-scale")
    blocks: list[Block] = []
    if loss is not None:
        median = "The strong line is a running median." if is_smoothed(run) else ""
        marks = "Marks at the top are steps that were skipped." if run.skipped else ""
        text = f"{median} {marks}".strip()
        blocks.append(Figure(title="Loss by step", body=loss, caption=text))
    elif run.first_losses:
        blocks.append(Text(text="No loss was finite."))
    else:
        do = "Pass a `history` to `preamp.initialize`, and call `backward` in `preamp.scale_loss`"
        blocks.append(Missing(what="No loss was recorded", do=do))
    if scale is not None:
        text = "It halves at each overflow and doubles after a row of steps without one."
        caption = text if run.is_dynamic else "It is constant."
        blocks.append(Figure(title="Loss scale by step", body=scale, caption=caption))
    return Section(name=prefix, title="Loss and loss scale", blocks=blocks)
