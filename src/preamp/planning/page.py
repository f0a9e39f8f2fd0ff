# SPDX-License-Identifier: BSD-3-Clause
"""A plan as one HTML page, with the losses of the steps that were tried."""

from __future__ import annotations

from pathlib import Path

from preamp.core.files import replace_text
from preamp.numerics.records import StepRecord
from preamp.planning.report import COLUMNS, PlanReport, cells_of, choice_of, code_lines, misfits_of
from preamp.report.blocks import Block, Figure, Missing, Page, Section, Table, Text, columns
from preamp.report.finding import Verdict
from preamp.report.gather import Run
from preamp.report.page import fill
from preamp.report.svg import joined, tag
from preamp.report.timeline import loss_comparison


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
            Section(name="levels", title="Levels", blocks=[_table(report), _losses(report)]),
            Section(name="why", title="Why", blocks=[Figure(title="Code", body=code), *reasons]),
            *_misfits(report),
        ],
        chapters=[],
        closing=[],
        made="Planned on one batch, from the model as it was given.",
    )
    return fill(page)


def _table(report: PlanReport) -> Table:
    return Table(
        name="levels-table",
        caption="What each level takes, and what its verdict rests on",
        columns=columns(*COLUMNS, wide=COLUMNS[:1]),
        rows=[cells_of(plan) for plan in report.levels.values()],
    )


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


def _misfits(report: PlanReport) -> list[Section]:
    blocks = [
        Text(text=f"{heading} {line}") for heading, lines in misfits_of(report) for line in lines
    ]
    return [Section(name="misfits", title="What speaks against", blocks=blocks)] if blocks else []
