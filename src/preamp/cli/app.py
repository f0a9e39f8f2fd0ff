# SPDX-License-Identifier: BSD-3-Clause
"""The ``preamp`` command and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from preamp.cli import run as program
from preamp.cli.checkpoint import checkpoint, convert_checkpoint
from preamp.cli.demo import demo
from preamp.cli.doctor import run_doctor
from preamp.cli.estimate import estimate
from preamp.cli.levels import levels
from preamp.cli.plan import plan
from preamp.cli.report import report

app = typer.Typer(
    name="preamp",
    help="Mixed-precision training for PyTorch in one call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(convert_checkpoint)
app.command()(levels)
app.command()(estimate)
app.command()(plan)
app.command()(report)
app.add_typer(checkpoint)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="script.py | -m module [argument ...]")
    ] = None,
) -> None:
    """Run a program written for Apex, unchanged."""
    program.run(arguments or [])


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[options] script.py | -m module [argument ...]")
    ] = None,
) -> None:
    """Run a training program and report usage bugs of mixed precision."""
    run_doctor(arguments or [])
