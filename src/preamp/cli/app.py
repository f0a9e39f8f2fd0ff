# SPDX-License-Identifier: BSD-3-Clause
"""The ``preamp`` command and its sub-commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer

from preamp.cli.doctor import doctor
from preamp.cli.estimate import estimate
from preamp.cli.report import report
from preamp.cli.run import run

app = typer.Typer(
    name="preamp",
    help="Mixed-precision training for PyTorch in one call. preamp --version tells versions.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(estimate)
app.command()(report)
for _command in (run, doctor):  # what follows the program is the program's own
    app.command(context_settings={"allow_interspersed_args": False})(_command)


def parse(arguments: Sequence[str]) -> Callable[[], None]:
    """Do what a command line asks for; returns the program that it names, to be run afterwards.

    Raises `SystemExit` where there is no such program, with the status of what was done.
    """
    programs: list[Callable[[], None]] = []
    try:
        typer.main.get_command(app)(list(arguments), prog_name="preamp", obj=programs)
    except SystemExit:
        if not programs:
            raise
    return programs[0]
