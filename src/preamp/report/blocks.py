# SPDX-License-Identifier: BSD-3-Clause
"""What a page is made of; the template knows how each kind of block is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from preamp.report.finding import Finding, Verdict
from preamp.report.svg import Html

WITH_NUMERICS = 'Pass `numerics="full"` to `preamp.initialize` to have it in the next run'


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture."""

    kind: ClassVar[str] = "figure"
    title: str  # what it shows; text from outside is escaped
    body: Html  # the picture and its legend
    caption: str = ""  # what to see in it, or how to read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str  # heading
    is_number: bool = False  # whether to align to the right
    is_wide: bool = False  # whether it takes the room that is left
    unit: str = ""  # second line of the heading; may be empty


def columns(*titles: str, numbers: Sequence[str] = (), wide: Sequence[str] = ()) -> list[Column]:
    """Make columns of their titles."""
    return [Column(title=t, is_number=t in numbers, is_wide=t in wide) for t in titles]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; the first cell of each is its heading."""

    kind: ClassVar[str] = "table"
    name: str  # id, alone on the page
    caption: str  # what it lists
    columns: Sequence[Column]  # from left to right
    rows: Sequence[Sequence[str]]  # cells, escaped unless they are `Html`
    # Makes the table a part that is opened on demand; empty for one that is always open.
    summary: str = ""
    is_fluid: bool = False  # whether it fits every width, so that it need not scroll
    after: str = ""  # what stands below, such as a legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that is not there."""

    kind: ClassVar[str] = "missing"
    what: str  # what would be here
    do: str  # what to switch on, in words; code between backticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """One finding, and what shows it."""

    finding: Finding
    figure: Figure | None  # the picture that shows it, unless it is somewhere else
    see: tuple[str, str] | None  # id and name of that place


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the rules found."""

    kind: ClassVar[str] = "advice"
    items: Sequence[Advised]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values, as a list or, in the header, as tiles."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, str]]


Block = Figure | Table | Text | Missing | Advice | Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page with a heading."""

    name: str  # id, alone on the page
    title: str  # heading
    blocks: Sequence[Block]  # what is in it
    lead: str = ""  # a sentence or two that say what there is to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One run of several."""

    name: str  # id, alone on the page
    title: str  # heading
    verdict: Verdict  # the run in a few sentences
    facts: Sequence[tuple[str, str]]  # about the run
    sections: Sequence[Section]  # its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it."""

    title: str  # heading and window title
    # One for each run, with its name; the name of a single one is empty.
    verdicts: Sequence[tuple[str, str, Verdict]]
    facts: Sequence[tuple[str, str]]  # tiles of the header
    sections: Sequence[Section]  # parts that belong to no run in particular, or to the only one
    chapters: Sequence[Chapter]  # one for each run of several
    closing: Sequence[Section]  # parts that come last
    made: str  # what made the page, and when
    intro: str = ""  # a paragraph below the heading; may be empty
