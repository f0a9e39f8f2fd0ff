# SPDX-License-Identifier: BSD-3-Clause
"""The terminal that commands print to: its width, and tables and paragraphs that fit it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Generator, Iterable, Sequence
from typing import NoReturn

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table
from rich.text import Text

from preamp.core.errors import PreampError

REFUSED = 2  # exit status where nothing was done, as Python's own for what it cannot open


def refuse(why: object) -> NoReturn:
    """End the command, and say why nothing was done."""
    print(f"Error: {why}", file=sys.stderr)
    raise SystemExit(REFUSED) from None


def make_console() -> Console:
    """A console on standard output, as wide as ``COLUMNS`` says or the terminal is, or 80."""
    return Console() if sys.stdout.isatty() else Console(width=shutil.get_terminal_size().columns)


@contextlib.contextmanager
def refusing(*more: type[Exception]) -> Generator[None]:
    """End the command, and say why, where what it was given cannot be used."""
    try:
        yield
    except (ValueError, OSError, PreampError, *more) as error:
        refuse(error)


def print_plainly(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_wrapped(console: Console, lines: Iterable[str]) -> None:
    """Print lines of prose, each wrapped by itself; one that is indented is code, and stays."""
    prose = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
    for line in lines:
        prose.subsequent_indent = "  " if line.startswith("- ") else ""
        print_plainly(console, line if line.startswith(" ") else prose.fill(line))


def print_table(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table; one that is too wide goes on below, with its first column repeated.

    The first ``left`` columns are aligned to the left, the others to the right.
    """
    cells = [[Text(cell) for cell in line] for line in (headings, *rows)]
    widths = [
        max(console.measure(cell).maximum for cell in column) for column in zip(*cells, strict=True)
    ]
    for group in _groups(widths, console.width):
        fits_widely = sum(widths[i] + 2 for i in group) <= console.width
        padding = (0, int(fits_widely), 0, 0)
        table = Table(box=SIMPLE_HEAVY, show_edge=False, pad_edge=False, padding=padding)
        for i in group:
            justify = "left" if i < left else "right"
            table.add_column(cells[0][i], justify=justify, overflow="fold")
        for row in cells[1:]:
            table.add_row(*(row[i] for i in group))
        console.print(table)
        console.print()


def _groups(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Which columns stand together: as many as ``limit`` allows, the first one in every group."""
    groups = [[0]]
    for i in range(1, len(widths)):
        used = sum(widths[column] + 1 for column in groups[-1])
        if len(groups[-1]) > 1 and used + widths[i] > limit:
            groups.append([0])
        groups[-1].append(i)
    return groups
