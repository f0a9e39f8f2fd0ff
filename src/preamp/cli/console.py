# SPDX-License-Identifier: BSD-3-Clause
"""The terminal that commands print to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

import typer
from rich.console import Console

REFUSED = 2  # exit status where nothing was done, as of a shell's builtin


def make_console() -> Console:
    """A console on standard output; one without a width gets one that fits the tables."""
    return Console() if sys.stdout.isatty() else Console(width=100)


@contextlib.contextmanager
def only_answer_on_stdout(*, is_wanted: bool) -> Generator[None]:
    """Send what a user's code prints to standard error, so that JSON stands alone."""
    with contextlib.redirect_stdout(sys.stderr) if is_wanted else contextlib.nullcontext():
        yield


def refused(error: Exception) -> typer.Exit:
    """Say why nothing was done; returns what ends the command."""
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(REFUSED)


def print_plainly(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
