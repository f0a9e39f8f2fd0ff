# SPDX-License-Identifier: BSD-3-Clause
"""What a page is made of; the template knows how each kind of block is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from preamp.report.finding import Finding, Verdict
from preamp.report.html import Html


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture."""

    kind: ClassVar[str] = "figure"
    title: str  # what it shows; text from outside is escaped
    body: Html  # the picture
    caption: str = ""  # what to see in it, or how to read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; the first cell of each is its heading."""

    kind: ClassVar[str] = "table"
    name: str  # id, alone on the page
    caption: str  # what it lists
    columns: Sequence[str]  # their headings, from left to right
    numbers: Sequence[str]  # those of them that are aligned to the right
    wide: Sequence[str]  # those that take the room that is left
    rows: Sequence[Sequence[str]]  # cells, escaped unless they are `Html`


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph, also of what is missing and what to switch on; code between backticks."""

    kind: ClassVar[str] = "text"
    text: str


Block = Figure | Table | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page with a heading."""

    name: str  # id, alone on the page
    title: str  # heading
    blocks: Sequence[Block]  # what is in it
    lead: str = ""  # a sentence or two that say what there is to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One run."""

    name: str  # id, alone on the page
    title: str  # heading; empty for the only run of a page
    verdict: Verdict  # the run in a few sentences
    facts: Sequence[tuple[str, str]]  # about the run
    findings: Sequence[Finding]  # what to do, the gravest first
    sections: Sequence[Section]  # its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it."""

    title: str  # heading and window title
    comparison: Sequence[Section]  # of several runs
    chapters: Sequence[Chapter]  # one for each run
    made: str  # what made the page, and when
