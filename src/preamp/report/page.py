# SPDX-License-Identifier: BSD-3-Clause
"""A run, or several side by side, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from preamp.core.errors import bad_value, unavailable
from preamp.core.extras import how_to_install
from preamp.core.files import replace_text
from preamp.numerics import History, Record
from preamp.report import words
from preamp.report.advice import advise, judge
from preamp.report.blocks import Chapter, Page, Section, Table
from preamp.report.finding import Finding
from preamp.report.gather import Run, gather
from preamp.report.html import Html, tag
from preamp.report.layers import layers_section
from preamp.report.skips import skips_section

Records = History | Iterable[Record]
Runs = Records | Mapping[str, Records]


def render(records: Runs, *, title: str = "Training report") -> str:
    """Write what is known of a run as one HTML page that refers to nothing outside itself.

    ``records`` are a history, or the records of a file in their order; several of them, by name,
    are compared. ``title`` heads the page. What is not recorded is named, with what to switch on.

    Raises:
        ValueError: A mapping without runs.
        PreampUnavailableError: jinja2 or matplotlib is missing.
    """
    runs = _runs(records)
    findings = [advise(run) for run in runs]
    compares = isinstance(records, Mapping) and len(runs) > 1
    return _fill(
        Page(
            title=title,
            comparison=[_comparison(runs, findings)] if compares else [],
            chapters=[
                _chapter(run, f"run{index}", found)
                for index, (run, found) in enumerate(zip(runs, findings, strict=True))
            ],
            made=_made(runs),
        )
    )


def write(path: Path, records: Runs, *, title: str = "Training report") -> Path:
    """Write the page of `render` to ``path``, and make its folder; returns the path.

    All of it is written, or nothing, with ``OSError``. ``title`` and the other errors are those of
    `render`.
    """
    path = Path(path)
    replace_text(path, render(records, title=title))
    return path


def _fill(page: Page) -> str:
    # Late, because the library is imported without jinja2 and must not need it.
    try:
        import jinja2
    except ImportError:
        raise unavailable(
            "Cannot import jinja2",
            "A report is written with it; the rest of the library does not need it",
            how_to_install("report"),
        ) from None
    loader = jinja2.PackageLoader("preamp.report", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = loader.get_source(environment, "style.css")[0]
    return environment.get_template("report.html.j2").render(page=page, style=Html(style))


def _visible(value: object) -> object:
    """Spell what is invisible in text from outside; HTML is left alone."""
    return words.visible(value) if type(value) is str else value


def _runs(records: Runs) -> list[Run]:
    if not isinstance(records, Mapping):
        return [gather(records)]
    named = cast("Mapping[str, Records]", records)
    if not named:
        raise bad_value(
            "Got no run",
            "A report is on one run or on several",
            "Pass a history, or a mapping from names to histories",
        )
    return [gather(one, name) for name, one in named.items()]


def _chapter(run: Run, name: str, findings: Sequence[Finding]) -> Chapter:
    return Chapter(
        name=name,
        title=words.shown(run.name),
        verdict=judge(run, findings),
        facts=_facts(run),
        findings=findings,
        sections=[skips_section(run, f"{name}-skips"), layers_section(run, f"{name}-layers")],
    )


def _comparison(runs: Sequence[Run], findings: Sequence[Sequence[Finding]]) -> Section:
    numbers, last = ("steps", "skipped", "last loss", "loss scale"), "verdict"
    table = Table(
        name="compare-table",
        caption="The main numbers",
        columns=("run", "level", *numbers, last),
        numbers=numbers,
        wide=(last,),
        rows=[
            _compared(run, f"#run{index}", judge(run, findings[index]).title)
            for index, run in enumerate(runs)
        ],
    )
    return Section(name="compare", title="Side by side", blocks=[table])


def _compared(run: Run, place: str, verdict: str) -> list[str]:
    losses, scales = run.first_losses, run.first_scales
    return [
        tag("a", tag("bdi", words.shown(run.name)), href=place),
        words.shown(run.start.opt_level, 16) if run.start else words.MISSING,
        f"{len(run.steps):,}",
        f"{len(run.skipped):,}",
        words.magnitude(losses[-1][1]) if losses else words.MISSING,
        words.scale(scales[-1][1]) if scales else words.MISSING,
        verdict,
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    start, scales = run.start, run.first_scales
    if start is not None:
        facts += [
            ("opt level", words.shown(start.opt_level, 16)),
            ("device", words.shown(start.device, 48)),
            ("parameters", f"{sum(start.parameters.values()):,}"),
        ]
    if run.steps:
        facts.append(("steps", f"{len(run.steps):,}"))
        facts.append(("skipped", f"{len(run.skipped):,}"))
    if scales:
        facts.append(("loss scale at the end", words.scale(scales[-1][1])))
    if start is not None:
        facts.append(("started", words.shown(start.started.replace("T", " "), 32)))
    return facts


def _made(runs: Sequence[Run]) -> str:
    versions = {(run.start.preamp, run.start.torch) for run in runs if run.start is not None}
    recorded = " and ".join(
        f"preamp {words.shown(ours, 24)} on torch {words.shown(torchs, 24)}"
        for ours, torchs in sorted(versions)
    )
    return f"Recorded by {recorded}." if recorded else "The records do not say what wrote them."
