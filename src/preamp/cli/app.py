# SPDX-License-Identifier: BSD-3-Clause
"""The ``preamp`` command and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

import preamp
from preamp.cli import run as program
from preamp.cli.checkpoint import checkpoint, convert_checkpoint
from preamp.cli.console import make_console
from preamp.cli.demo import demo
from preamp.cli.doctor import run_doctor
from preamp.cli.estimate import estimate
from preamp.cli.plan import plan
from preamp.cli.report import report
from preamp.core.dtypes import dtype_name


def levels() -> None:
    """Print what each opt level does by default."""
    table = Table(title="Opt levels", title_justify="left")
    table.add_column("level", style="bold")
    for heading in ("model cast to", "functions cast to", "batch norm", "masters", "loss scale"):
        table.add_column(heading, overflow="fold")
    table.add_column("in words", overflow="fold")
    for name, policy in preamp.OPT_LEVELS.items():
        table.add_row(
            name,
            _dtype(policy.cast_model_type),
            _dtype(policy.patch_torch_functions_type),
            "float32" if policy.keep_batchnorm_fp32 else "–",
            "float32" if policy.master_weights else "–",
            str(policy.loss_scale),
            policy.brief.split(":", 1)[-1].strip(),
        )
    make_console().print(table)


def _dtype(dtype: torch.dtype | None) -> str:
    return "–" if dtype is None else dtype_name(dtype)


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
