# SPDX-License-Identifier: BSD-3-Clause
"""What a page is made of; the template knows how each kind of block is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from preamp.report.advice import Finding, Verdict
from preamp.report.svg import Html


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture.

    Attributes:
        title: What it shows; text from outside is escaped.
        body: The picture and its legend.
        caption: What to see in it, or how to read it.
    """

    kind: ClassVar[str] = "figure"
    title: str
    body: Html
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Pictures side by side, where there is room.

    Attributes:
        figures: The pictures.
        legend: Of all of them.
    """

    kind: ClassVar[str] = "gallery"
    figures: Sequence[Figure]
    legend: Html


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        title: Heading.
        is_number: Whether to align to the right.
        is_wide: Whether it takes the room that is left.
        unit: Second line of the heading; may be empty.
    """

    title: str
    is_number: bool = False
    is_wide: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; the first cell of each is its heading.

    Attributes:
        name: Id, alone on the page.
        caption: What it lists.
        columns: From left to right.
        rows: Cells, escaped unless they are `Html`.
        summary: Makes the table a part that is opened on demand; empty for one that is always open.
        is_fluid: Whether it fits every width, so that it need not scroll.
        after: What stands below, such as a legend.
    """

    kind: ClassVar[str] = "table"
    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    summary: str = ""
    is_fluid: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that is not there.

    Attributes:
        what: What would be here.
        do: What to switch on, in words; code between backticks.
    """

    kind: ClassVar[str] = "missing"
    what: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the rules found."""

    kind: ClassVar[str] = "advice"
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values, as a list or, in the header, as tiles."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """HTML that somebody else made."""

    kind: ClassVar[str] = "ready"
    body: Html


Block = Figure | Gallery | Table | Text | Missing | Advice | Facts | Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        name: Id, alone on the page.
        title: Heading.
        blocks: What is in it.
        lead: A sentence or two that say what there is to see.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One run of several.

    Attributes:
        name: Id, alone on the page.
        title: Heading.
        verdict: The run in a few sentences.
        facts: About the run.
        sections: Its parts.
    """

    name: str
    title: str
    verdict: Verdict
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it.

    Attributes:
        title: Heading and window title.
        verdicts: One for each run, with its name; the name of a single one is empty.
        facts: Tiles of the header.
        sections: Parts that belong to no run in particular, or to the only one.
        chapters: One for each run of several.
        closing: Parts that come last.
        patterns: Patterns that pictures refer to.
        made: What made the page, and when.
        intro: A paragraph below the heading; may be empty.
    """

    title: str
    verdicts: Sequence[tuple[str, str, Verdict]]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    chapters: Sequence[Chapter]
    closing: Sequence[Section]
    patterns: Html
    made: str
    intro: str = ""
