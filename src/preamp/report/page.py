# SPDX-License-Identifier: BSD-3-Clause
"""A run, or several side by side, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from preamp.core.errors import bad_value, unavailable
from preamp.core.files import replace_text
from preamp.numerics import History, Record
from preamp.report import layers, memory, timeline, words
from preamp.report.advice import advice_section, advise, judge
from preamp.report.blocks import Block, Chapter, Facts, Figure, Page, Section, Table, columns
from preamp.report.casts import casts_section
from preamp.report.finding import Finding
from preamp.report.gather import Run, gather
from preamp.report.modules import modules_section
from preamp.report.skips import skips_section
from preamp.report.svg import Html, tag
from preamp.report.words import visible


def fill(page: Page) -> str:
    """Write a page as HTML; raises `PreampUnavailableError` where jinja2 is missing."""
    # Late, because the library is imported without jinja2 and must not need it.
    try:
        import jinja2
    except ImportError:
        raise unavailable(
            "Cannot import jinja2",
            "A report is written with it; the rest of the library does not need it",
            'Install it with: pip install "preamp[report]"',
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
    return visible(value) if type(value) is str else value


Records = History | Iterable[Record]
Runs = Records | Mapping[str, Records]


def render(
    records: Runs,
    *,
    title: str = "Training report",
    intro: str = "",
    before: Sequence[Section] = (),
    after: Sequence[Section] = (),
) -> str:
    """Write what is known of a run as one HTML page that refers to nothing outside itself.

    ``records`` are a history, or the records of a file in their order; several of them, by name,
    are compared. ``title`` heads the page, and ``intro`` is a sentence below it. The sections
    ``before`` and ``after`` stand around all others. What is not recorded is named on the page,
    with what to switch on.

    Raises:
        ValueError: A mapping without runs.
        PreampUnavailableError: jinja2 is missing.
    """
    runs = _runs(records)
    findings = [advise(run) for run in runs]
    verdicts = [
        (f"run{i}", words.shown(run.name), judge(run, findings[i])) for i, run in enumerate(runs)
    ]
    if len(runs) == 1:
        sections, chapters = [*before, *_sections(runs[0], "", findings[0])], list[Chapter]()
    else:
        sections = [*before, *_comparison(runs, findings)]
        chapters = [
            Chapter(
                name=name,
                title=words.shown(run.name),
                verdict=verdict,
                facts=_facts(run),
                sections=_sections(run, f"{name}-", found, with_memory=False),
            )
            for run, (name, _, verdict), found in zip(runs, verdicts, findings, strict=True)
        ]
    page = Page(
        title=title,
        verdicts=verdicts,
        facts=_facts(runs[0]) if len(runs) == 1 else [],
        sections=sections,
        chapters=chapters,
        closing=after,
        made=_made(runs),
        intro=intro,
    )
    return fill(page)


def write(
    path: Path,
    records: Runs,
    *,
    title: str = "Training report",
    intro: str = "",
    before: Sequence[Section] = (),
    after: Sequence[Section] = (),
) -> Path:
    """Write the page of `render` to ``path``, and make its folder; returns the path.

    All of it is written, or nothing, with ``OSError``. ``title``, ``intro``, the other arguments
    and the errors are those of `render`.
    """
    path = Path(path)
    page = render(records, title=title, intro=intro, before=before, after=after)
    replace_text(path, page)
    return path


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
    runs = list[Run]()
    for name, one in named.items():
        runs.append(gather(one, name, runs[-1].kept if runs else frozenset()))
    return runs


def _comparison(runs: Sequence[Run], findings: Sequence[Sequence[Finding]]) -> list[Section]:
    blocks: list[Block] = [_run_table(runs, findings, "compare")]
    loss = timeline.loss_comparison(runs, "compare-loss")
    if loss is not None:
        median = "Running medians. " if any(map(timeline.is_smoothed, runs)) else ""
        text = f"{median}Lines that lie on each other train equally well."
        blocks.append(Figure(title="Loss by step", body=loss, caption=text))
    return [
        Section(name="compare", title="Side by side", blocks=blocks),
        memory.memory_section(runs, "memory"),
    ]


def _run_table(runs: Sequence[Run], findings: Sequence[Sequence[Finding]], prefix: str) -> Table:
    """List the runs with their main numbers and findings; ``prefix`` is of the table's id."""
    of_losses = "; last losses are running medians" if any(map(timeline.is_smoothed, runs)) else ""
    numbers, last = ("steps", "skipped", "last loss", "loss scale", "memory"), "findings"
    return Table(
        name=f"{prefix}-table",
        caption=f"The main numbers{of_losses}",
        columns=columns("run", "level", *numbers, last, numbers=numbers, wide=(last,)),
        rows=[_compared(run, index, findings[index]) for index, run in enumerate(runs)],
    )


def _compared(run: Run, index: int, findings: Sequence[Finding]) -> list[str]:
    losses = timeline.smoothed(run.first_losses)
    scales = run.first_scales
    memory = sum(run.memory.categories.values()) if run.memory else None
    found = "; ".join(f"{f.severity.word}: {f.line}" for f in findings)
    return [
        tag("a", tag("bdi", words.shown(run.name)), href=f"#run{index}"),
        words.shown(run.start.opt_level, 16) if run.start else words.MISSING,
        f"{len(run.steps):,}",
        f"{len(run.skipped):,}",
        words.magnitude(losses[-1][1]) if losses else words.MISSING,
        words.scale(scales[-1][1]) if scales else words.MISSING,
        words.MISSING if memory is None else words.size(memory),
        found or judge(run, []).title,
    ]


def _sections(
    run: Run, prefix: str, findings: Sequence[Finding], *, with_memory: bool = True
) -> list[Section]:
    """Make all parts of a run's report, also of what is missing; ``prefix`` is of all ids."""
    parts = [
        advice_section(run, prefix, findings),
        timeline.timeline_section(run, f"{prefix}timeline"),
        skips_section(run, f"{prefix}skips"),
        layers.underflow_section(run, f"{prefix}underflow"),
        modules_section(run, f"{prefix}modules"),
        *([memory.memory_section([run], f"{prefix}memory")] if with_memory else []),
        casts_section(run, f"{prefix}casts"),
        _setup(run, f"{prefix}setup"),
    ]
    return [part for part in parts if part is not None]


def _setup(run: Run, prefix: str) -> Section | None:
    if run.start is None:
        return None
    facts = [(words.shown(k, 40), words.shown(v)) for k, v in run.start.policy.items()]
    return Section(name=prefix, title="Settings", blocks=[Facts(facts=facts)]) if facts else None


def _facts(run: Run) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    start = run.start
    if start is not None:
        facts += [
            ("opt level", words.shown(start.opt_level, 16)),
            ("device", words.shown(start.device, 48)),
            ("parameters", f"{sum(start.parameters.values()):,}"),
        ]
    scales = run.first_scales
    if run.steps:
        facts.append(("steps", f"{len(run.steps):,}"))
        facts.append(("skipped", f"{len(run.skipped):,}"))
    if scales:
        facts.append(("loss scale at the end", words.scale(scales[-1][1])))
    if run.memory:
        facts.append(("memory", words.size(sum(run.memory.categories.values()))))
    if start is not None:
        facts.append(("started", words.moment(start.started)))
    return facts


def _made(runs: Sequence[Run]) -> str:
    versions = {(run.start.preamp, run.start.torch) for run in runs if run.start is not None}
    recorded = " and ".join(
        f"preamp {words.shown(ours, 24)} on torch {words.shown(torchs, 24)}"
        for ours, torchs in sorted(versions)
    )
    return f"Recorded by {recorded}." if recorded else "The records do not say what wrote them."
