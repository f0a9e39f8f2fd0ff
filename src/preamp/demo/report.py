# SPDX-License-Identifier: BSD-3-Clause
"""A run as files: ``report.html`` for people, ``results.json`` and records for programs."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from itertools import accumulate
from pathlib import Path

from preamp import report
from preamp.core.errors import system_error, unavailable
from preamp.core.files import replace_text
from preamp.demo.records import DemoResult, LevelResult, to_json
from preamp.demo.table import Cell, columns_of, note_of, remarks_of
from preamp.numerics import to_json as record_to_json
from preamp.policy.storage import storage_name
from preamp.report.blocks import Block, Column, Facts, Figure, Section, Table, Text
from preamp.report.chart import Chart, Line, draw, finite_range, linear
from preamp.report.svg import Html, joined, tag
from preamp.report.timeline import loss_scale_of, smoothed


def require_packages() -> None:
    """Refuse before the training, not after it, where the report cannot be written."""
    if importlib.util.find_spec("jinja2") is None:
        raise unavailable(
            "Cannot import jinja2",
            "The report needs jinja2",
            'Install them with: pip install "preamp[cli,report]"',
        )


def require_folder(folder: Path) -> None:
    """Refuse before the training a folder that cannot be made or written to, by an `OSError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise system_error(
            error,
            f"{folder} cannot be written to",
            "The report and its data go to a folder, which is made where it does not exist",
            "Pass another one by --out",
        ) from None


def write(result: DemoResult, folder: Path) -> tuple[Path, Path]:
    """Write and return the report and the data; write records of each level under ``runs``."""
    page, data = folder / "report.html", folder / "results.json"
    replace_text(data, json.dumps(to_json(result), indent=1, allow_nan=False) + "\n")
    for row in result.levels:
        if row.records:  # what ``preamp report`` reads
            lines = (json.dumps(record_to_json(r), allow_nan=False) + "\n" for r in row.records)
            replace_text(folder / "runs" / f"{row.level}.jsonl", "".join(lines))
    replace_text(page, render(result))
    return page, data


def render(result: DemoResult) -> str:
    """Write a run as one HTML page that refers to nothing outside itself."""
    intro = (
        f"A byte-level GPT with {result.parameters:,} parameters, trained on the Python standard "
        "library's source text once for each opt level, from the same initial weights and on the "
        "same batches. Losses are in bits per byte."
    )
    if result.interrupted:
        intro += " Interrupted: this is what was measured until then."
    return report.render(
        {row.level: row.records for row in result.levels} or [],
        title="preamp demo",
        intro=intro,
        before=[_results(result)],
        after=[_settings(result)],
    )


def _results(result: DemoResult) -> Section:
    columns = columns_of(result)
    table = Table(
        name="results-table",
        caption="Small print below a number is its ratio to O0, or its parts",
        columns=[Column(title=c.title, unit=c.unit, is_number=c.is_number) for c in columns],
        rows=[[_html_of(c.cell(row, result.baseline)) for c in columns] for row in result.levels],
    )
    remarks = [(row.level, note_of(row, result)) for row in result.levels]
    blocks: list[Block] = [table, Facts(facts=remarks)]
    picture = _loss_by_time(result)
    if picture is not None:
        text = "A line further to the left got there faster."
        blocks.append(Figure(title="Loss by time", body=picture, caption=text))
    blocks += [Text(text=text) for text in remarks_of(result)]
    return Section(name="results", title="Results", blocks=blocks)


def _html_of(cell: Cell) -> Html:
    return joined([cell.value, *([tag("small", cell.detail)] if cell.detail else [])])


def _loss_by_time(result: DemoResult) -> Html | None:
    rows = [(row, _points(row)) for row in result.levels]
    y = loss_scale_of([loss for _, points in rows for _, loss in points])
    if y is None:
        return None
    _, longest = finite_range(x for _, points in rows for x, _ in points) or (0.0, 1.0)
    lines = [Line(name=row.level, points=p, style=i) for i, (row, p) in enumerate(rows) if p]
    ends = (f"{row.level} took {points[-1][0]:.3g} seconds" for row, points in rows if points)
    chart = Chart(
        name="loss-by-time",
        title="Training loss by seconds of training",
        description="; ".join(ends) + ".",
        lines=lines,
        x=linear(0.0, longest, lambda value: f"{value:g}"),
        y=y,
        x_name="seconds",
        height=220,
    )
    return draw(chart)


def _points(row: LevelResult) -> list[tuple[float, float]]:
    seconds = accumulate(row.step_seconds)
    points = smoothed(list(zip(seconds, row.losses, strict=True)))
    return points if any(math.isfinite(loss) for _, loss in points) else []


def _settings(result: DemoResult) -> Section:
    config, model, optimizer = result.config, result.config.model, result.config.optimizer
    betas, storage = ", ".join(map(str, optimizer.betas)), storage_name(config.kept)
    facts = [
        ("device", result.device),
        *result.versions.items(),
        ("levels", ", ".join(config.levels)),
        ("ranks", f"{config.ranks}, parallel {config.parallel}"),
        ("steps", f"{config.steps} of {config.batch} × {model.context} bytes"),
        ("model", f"{model.layers} layers, width {model.width}, {model.heads} heads"),
        ("optimizer", "FusedAdam" if config.has_fused_optimizer else "AdamW"),
        ("storage", storage),
        ("learning rate", f"{optimizer.learning_rate}, decay {optimizer.weight_decay}"),
        ("betas and eps", f"{betas}; {optimizer.eps}"),
        ("clipped to", "nothing" if config.kept.applies_at_once else str(optimizer.max_norm)),
        ("seed", str(config.seed)),
        ("text", f"{result.train_bytes:,} bytes to learn from, {result.held_out_bytes:,} held out"),
    ]
    return Section(name="demo-settings", title="Settings of the demo", blocks=[Facts(facts=facts)])
