# SPDX-License-Identifier: BSD-3-Clause
"""``preamp convert-checkpoint``: a file written with Apex as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from preamp.checkpoint import Finding, convert_apex_checkpoint
from preamp.checkpoint.convert import RECORD
from preamp.cli.console import make_console


def convert_checkpoint(
    src: Annotated[Path, typer.Argument(help="File that a script wrote with Apex.")],
    dst: Annotated[Path, typer.Argument(help="Where the converted file goes.")],
    explain: Annotated[
        bool, typer.Option("--explain", help="List what was found and what becomes of it.")
    ] = False,
) -> None:
    """Write a checkpoint made with Apex as plain data, which torch.load reads by default.

    Nothing in the file is executed: what is neither a tensor, plain data nor one of Apex's loss
    scalers is refused.
    """
    try:
        findings = convert_apex_checkpoint(src, dst)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    console = make_console()
    if explain:
        console.print(_table(findings, src))
    converted = sum(finding.kind.startswith(RECORD) for finding in findings)
    objects = "1 object" if converted == 1 else f"{converted} objects"
    console.print(
        f"{objects} made plain data: {dst}", markup=False, soft_wrap=True, highlight=False
    )


def _table(findings: tuple[Finding, ...], src: Path) -> Table:
    table = Table(title=escape(src.name), title_justify="left")
    for heading in ("key", "found", "becomes"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(
            escape(finding.key or "(the file)"), escape(finding.kind), escape(finding.becomes)
        )
    return table
