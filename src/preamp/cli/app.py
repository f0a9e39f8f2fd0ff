# SPDX-License-Identifier: BSD-3-Clause
"""The ``preamp`` command and its sub-commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer

import preamp
from preamp.cli import run as program
from preamp.cli.console import make_console, print_table, print_wrapped
from preamp.cli.doctor import run_doctor
from preamp.cli.estimate import estimate
from preamp.cli.main import versions
from preamp.cli.report import report
from preamp.core.dtypes import dtype_name

_HEADINGS = ("level", "model is", "functions run in", "batch norm", "masters", "loss scale")


def levels() -> None:
    """Print what each opt level does by default."""
    rows = [
        (
            name,
            _dtype(policy.cast_model_type),
            _dtype(policy.patch_torch_functions_type),
            "float32" if policy.keep_batchnorm_fp32 else "–",
            "float32" if policy.master_weights else "–",
            str(policy.loss_scale),
        )
        for name, policy in preamp.OPT_LEVELS.items()
    ]
    console = make_console()
    print_table(console, _HEADINGS, rows, left=len(_HEADINGS))
    print_wrapped(console, (" ".join(row.brief.split()) for row in preamp.OPT_LEVELS.values()))


def _dtype(dtype: torch.dtype | None) -> str:
    return "–" if dtype is None else dtype_name(dtype)


app = typer.Typer(
    name="preamp", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_versions, help="Print versions, and stop."
        ),
    ] = False,
) -> None:
    """Mixed-precision training for PyTorch in one call."""


for _command in (levels, estimate, report):
    app.command()(_command)


def _passed_on(name: str, brief: str, call: Callable[[list[str]], None]) -> None:
    """List a command that `preamp.cli.main` calls itself, since it needs neither rich nor typer."""

    def command(context: typer.Context) -> None:
        call(context.args)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    settings["allow_interspersed_args"] = False
    app.command(name, help=brief, add_help_option=False, context_settings=settings)(command)


_passed_on("run", "Run a program written for Apex, unchanged.", lambda given: program.run(given))
_passed_on("doctor", "Run a training program and report usage bugs of mixed precision.", run_doctor)
