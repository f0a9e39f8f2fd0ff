# SPDX-License-Identifier: BSD-3-Clause
"""What a plan says: records, their text, and one HTML page with the losses that were tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from preamp.core.files import replace_text
from preamp.core.pytree import plain
from preamp.numerics.records import StepRecord
from preamp.planning.forecast import TensorForecast
from preamp.planning.memory import MemoryEstimate
from preamp.planning.verify import Verification
from preamp.policy.storage import storage_code
from preamp.report.blocks import Block, Figure, Missing, Page, Section, Table, Text, columns
from preamp.report.finding import Verdict
from preamp.report.gather import Run
from preamp.report.page import fill
from preamp.report.svg import joined, tag
from preamp.report.timeline import loss_comparison

ProblemKind = Literal[
    "overflow",
    "gradient overflow",
    "underflow",
    "stall",
    "optimizer",
    "losses",
    "refused",
    "memory",
]
_SHOWN = 3  # problems of one kind that the text names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """Why a level does not fit.

    Attributes:
        kind: ``"overflow"``: a value of the forward, a weight or a buffer is too large for the
            half format. ``"gradient overflow"``: a gradient is, even without a loss scale.
            ``"underflow"``: gradients vanish at the scale. ``"stall"``: updates round to nothing.
            ``"optimizer"``: what it divides by is zero in the half format of its state.
            ``"losses"``: the steps taken at the level did not follow float32's. ``"refused"``:
            at the level the model, the loss or the optimizer raises what it does not in float32.
            ``"memory"``: there was not enough of it to try the level beside the caller's model.
        name: The tensor, as in `TensorForecast`; empty for the model as a whole.
        text: One sentence with the number that led to it.
        was_tried: Whether the steps trained at the level showed it; otherwise it is forecast, or
            what was raised.
    """

    kind: ProblemKind
    name: str
    text: str
    was_tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """What was found out about one level.

    Attributes:
        level: Its name; `PURE_BFLOAT16` for O5 without masters.
        half: ``"float16"``, ``"bfloat16"``, or ``""`` where all is float32.
        loss_scale: The scale that gradients were forecast with.
        problems: Why it does not fit; empty if it does.
        is_tight: It fits with little room: in float16 less than 3 powers of two are left above
            some value, or some gradients vanish at any scale that does not overflow; at any level
            the steps tried were near the limit, or did not show a trouble that was forecast.
        tensors: What the level has in half, as it would be there.
        memory: By category.
        verification: The steps taken at it, if any were.
        notes: What makes it tight, as far as the steps tried showed it; a sentence each.
    """

    level: str
    half: str
    loss_scale: float
    problems: tuple[PlanProblem, ...]
    is_tight: bool
    tensors: tuple[TensorForecast, ...]
    memory: MemoryEstimate
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    @property
    def rests_on(self) -> str:
        """What the verdict follows from: ``"an error"``, ``"a forecast"``, or ``"8 steps"``."""
        if any(problem.kind in ("refused", "memory") for problem in self.problems):
            return "an error"
        forecast = self.problems and not any(problem.was_tried for problem in self.problems)
        if self.verification is None or forecast:
            return "a forecast"
        return f"{len(self.verification.losses)} steps"

    @property
    def fits(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The outcome of `plan`.

    Attributes:
        recommended: The level to take: ``"O0"`` if no other fits.
        loss_scale: The scale to start with; 1 where none is needed.
        reasons: Why, one sentence each.
        levels: Everything that was looked at, by level.
        runner_up: The second choice, or ``None``.
        fp32_losses: Losses of float32 that the levels were compared with.
        steps: Float32 steps that were watched.
    """

    recommended: str
    loss_scale: float
    reasons: tuple[str, ...]
    levels: Mapping[str, LevelPlan]
    runner_up: str | None
    fp32_losses: tuple[float, ...]
    steps: int

    @property
    def verify_steps(self) -> int:
        """Steps that each level was trained."""
        return len(self.fp32_losses)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what ``json.dumps(..., allow_nan=False)`` accepts."""
        levels = {
            name: {**plain(plan), "fits": plan.fits, "rests_on": plan.rests_on}
            for name, plan in self.levels.items()
        }
        return {**plain(dataclasses.replace(self, levels={})), "levels": levels}

    def __str__(self) -> str:
        """Several lines of text."""
        return "\n".join([*advice_lines(self), "", *_table(table_of(self)), *misfit_lines(self)])


def advice_lines(report: PlanReport) -> list[str]:
    """What to take, how to write it, and why: what stands above the table of levels."""
    lines = [f"Recommended: {choice_of(report)}", *(f"  {line}" for line in code_lines(report))]
    return [*lines, "", *(f"- {reason}" for reason in report.reasons)]


def choice_of(report: PlanReport) -> str:
    """The level to take, with its loss scale if it needs one."""
    scale = f" with loss scale {report.loss_scale:,.0f}" if report.loss_scale != 1 else ""
    return f"{report.recommended}{scale}"


def code_lines(report: PlanReport) -> list[str]:
    """How to write what is recommended."""
    plan = report.levels.get(report.recommended)
    storage = "full" if plan is None else plan.memory.storage
    chosen = "" if storage == "full" else f", storage={storage_code(storage)}"
    lines = [f'preamp.initialize(model, optimizer, opt_level="{report.recommended}"{chosen})']
    if report.loss_scale != 1:
        lines.append(f"preamp.engine_of(optimizer).scaler(0).set_scale({report.loss_scale})")
    return lines


def misfit_lines(report: PlanReport) -> list[str]:
    """What speaks against levels, a paragraph for each: what stands below the table."""
    lines: list[str] = []
    for heading, texts in misfits_of(report):
        lines += ["", heading, *(f"- {text}" for text in texts)]
    return lines


def misfits_of(report: PlanReport) -> list[tuple[str, list[str]]]:
    """Of each level that does not fit, or only just, a heading and what speaks against it."""
    return [
        (f"{plan.level} does not fit:", problem_lines(plan.problems))
        if plan.problems
        else (f"{plan.level} fits with little room:", list(plan.notes))
        for plan in report.levels.values()
        if plan.problems or plan.notes
    ]


def problem_lines(problems: Sequence[PlanProblem]) -> list[str]:
    """The first problems of each kind, and how many more there are."""
    lines: list[str] = []
    for kind in dict.fromkeys(problem.kind for problem in problems):
        same = [problem.text for problem in problems if problem.kind == kind]
        lines += same[:_SHOWN]
        if len(same) > _SHOWN:
            lines.append(f"{len(same) - _SHOWN} more tensors have the same problem ({kind}).")
    return lines


def bytes_text(count: int | None) -> str:
    """``1234567`` as ``"1.18 MiB"``; what is not known as a dash."""
    if count is None:
        return "–"
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = next(units)
    while value >= 1024 and unit != "EiB":
        value, unit = value / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def storages_text(memory: MemoryEstimate) -> str:
    """What is kept from step to step, and with which storages it is less."""
    if memory.place == "host":
        here, there = bytes_text(memory.on_device), bytes_text(memory.on_host)
        return f"At {memory.opt_level} {here} are kept on the card, and {there} on the host."
    sizes = [f"{bytes_text(memory.total)} are kept"]
    for code, size in memory.smaller.items():
        rest = ", the rest on the host" if "place='host'" in code else ""
        sizes.append(f"{bytes_text(size)} with storage={code}{rest}")
    return f"At {memory.opt_level} {'; '.join(sizes)}."


def table_of(report: PlanReport) -> list[tuple[str, ...]]:
    """The table of levels: its headings, and a row for each."""
    on_host = any(plan.memory.place == "host" for plan in report.levels.values())
    sizes = ("kept on card", "on host", "peak on card") if on_host else ("kept", "peak")
    return [
        ("level", "fits", "rests on", *sizes, "loss / fp32's"),
        *map(_cells, report.levels.values()),
    ]


def _cells(plan: LevelPlan) -> tuple[str, ...]:
    fits = "no" if plan.problems else "tight" if plan.is_tight else "yes"
    verified = plan.verification
    losses = "not run"
    if verified is not None:
        is_number = math.isfinite(verified.reached)
        losses = f"{verified.reached:.4g} / {verified.expected:.4g}" if is_number else "not finite"
    memory = plan.memory
    kept = (memory.on_device, memory.on_host) if memory.place == "host" else (memory.total,)
    sizes = map(bytes_text, (*kept, memory.peak))
    return plan.level, fits, plan.rests_on, *sizes, losses


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def write(report: PlanReport, path: Path) -> None:
    """Write the page of `render`, all of it or, with ``OSError``, nothing."""
    replace_text(path, render(report))


def render(report: PlanReport) -> str:
    """Write a plan as one HTML page that refers to nothing outside itself.

    Raises:
        PreampUnavailableError: jinja2 is missing.
    """
    code = joined(tag("pre", line) for line in code_lines(report))
    reasons = [Text(text=reason) for reason in report.reasons]
    misfits = [
        Text(text=f"{heading} {line}") for heading, lines in misfits_of(report) for line in lines
    ]
    headings, *rows = table_of(report)
    levels = Table(
        name="levels-table",
        caption="What each level takes, and what its verdict rests on",
        columns=columns(*headings, wide=headings[:1]),
        rows=rows,
    )
    verdict = Verdict(
        kind="warning" if report.recommended == "O0" else "good",
        title=f"Take {choice_of(report)}",
        where="",
        text=report.reasons[0],
    )
    page = Page(
        title="Which level to take",
        verdicts=[("", "", verdict)],
        facts=[("steps watched", f"{report.steps}"), ("steps tried", f"{report.verify_steps}")],
        sections=[
            Section(name="levels", title="Levels", blocks=[levels, _losses(report)]),
            Section(name="why", title="Why", blocks=[Figure(title="Code", body=code), *reasons]),
            *(
                [Section(name="misfits", title="What speaks against", blocks=misfits)]
                * bool(misfits)
            ),
        ],
        chapters=[],
        closing=[],
        made="Planned on one batch, from the model as it was given.",
    )
    return fill(page)


def _losses(report: PlanReport) -> Block:
    rows = {"O0": report.fp32_losses}
    for name, plan in report.levels.items():
        rows[name] = () if plan.verification is None else plan.verification.losses
    runs = [
        Run(
            name=name,
            steps=[
                StepRecord(step=step, losses={0: loss}, scales={}, skipped=False)
                for step, loss in enumerate(losses, 1)
            ],
        )
        for name, losses in rows.items()
        if losses
    ]
    chart = loss_comparison(runs, "tried")
    if chart is None:
        return Missing(what="No level was trained.", do="Plan with `--verify 8`.")
    text = "From the same weights, on the same batch. A line that ends early is inf or nan."
    return Figure(title="Loss by step", body=chart, caption=text)
