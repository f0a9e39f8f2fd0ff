# SPDX-License-Identifier: BSD-3-Clause
"""``preamp checkpoint``: what is in a file or a sharded folder, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from preamp.checkpoint.summary import Summary, summarize_checkpoint
from preamp.cli.console import make_console
from preamp.core.errors import PreampError
from preamp.planning.report import bytes_text

DAMAGED = 2

checkpoint = typer.Typer(
    name="checkpoint", help="Look into files of preamp.save_checkpoint.", no_args_is_help=True
)


@checkpoint.callback()
def _commands() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep ``show`` a command of its own, as the only one there is."""


@checkpoint.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="File or folder of preamp.save_checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify a checkpoint and tell what is in it. Nothing in it is executed.

    The exit status is 2 if it is damaged or cannot be read, and the message says why.
    """
    try:
        summary = summarize_checkpoint(path)
    except (OSError, PreampError) as error:
        if as_json:
            answer = {"path": str(path), "status": "refused", "reason": str(error)}
            typer.echo(json.dumps(answer, indent=2))
        else:
            typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(DAMAGED) from None
    if as_json:
        typer.echo(json.dumps({"status": "verified", **summary.to_json()}, indent=2))
    else:
        _print(summary, make_console())


def _print(summary: Summary, console: Console) -> None:
    by = summary.written_by
    lines = [
        f"{summary.path}: verified, {bytes_text(summary.size)}",
        f"written by preamp {by['preamp']} with torch {by['torch']}, content version "
        f"{by['version']}, {summary.ranks} rank{'s' * (summary.ranks != 1)}",
    ]
    for engine in summary.engines:
        scales = ", ".join(f"{scale:g}" for scale in engine["loss_scales"])
        lines.append(f"opt level {engine['opt_level']}, loss scale {scales}")
        for number, steps in enumerate(engine["steps"]):
            lines.append(
                f"  optimizer {number}: {steps['applied']} steps applied, "
                f"{steps['skipped']} skipped"
            )
    for optimizer in summary.optimizers:
        lines.append(f"{optimizer['class']} over {optimizer['parameters']} parameters")
    lines += summary.schedulers
    extra = summary.extra
    lines.append(f"extra: {extra if isinstance(extra, str) else ', '.join(extra) or 'empty'}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for model in summary.models:
        console.print(f"\n{model['class']}", markup=False, highlight=False, soft_wrap=True)
        console.print(_model_table(model))
    table = _table("Bytes of tensors", ("of", "size"))
    for category, count in summary.bytes.items():
        table.add_row(category, bytes_text(count))
    console.print(table)


def _model_table(model: dict[str, Any]) -> Table:
    table = _table(None, ("tensor", "shape", "dtype"))
    for tensor in model["tensors"]:
        shape = " × ".join(map(str, tensor["shape"])) or "scalar"
        table.add_row(escape(tensor["name"]), shape, tensor["dtype"])
    return table


def _table(title: str | None, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
