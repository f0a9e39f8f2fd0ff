# SPDX-License-Identifier: BSD-3-Clause
"""``preamp checkpoint`` and ``convert-checkpoint``: what is in a file, and whether it is whole."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from preamp.checkpoint import convert_apex_checkpoint
from preamp.checkpoint.apex.findings import RECORD
from preamp.checkpoint.summary import Summary, summarize_checkpoint
from preamp.cli.console import make_console, print_plainly, print_table, print_wrapped, refusing
from preamp.cli.options import AsJson
from preamp.cli.run import REFUSED, refuse
from preamp.core.errors import PreampError
from preamp.memory.text import bytes_text

checkpoint = typer.Typer(
    name="checkpoint", help="Look into files of preamp.save_checkpoint.", no_args_is_help=True
)


@checkpoint.callback()
def _commands() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep ``show`` a command of its own, as the only one there is."""


@checkpoint.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="File or folder of preamp.save_checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Verify a checkpoint and tell what is in it. Nothing in it is executed.

    The exit status is 2 if it is damaged or cannot be read, and the message says why.
    """
    try:
        summary = summarize_checkpoint(path)
    except (OSError, PreampError) as error:
        if not as_json:
            refuse(error)
        answer = {"path": str(path), "status": "refused", "reason": str(error)}
        typer.echo(json.dumps(answer, indent=2))
        raise typer.Exit(REFUSED) from None
    if as_json:
        typer.echo(json.dumps({"status": "verified", **asdict(summary)}, indent=2))
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
    lines += (
        f"{one['class']} over {one['parameters']} parameters, storage {one['storage']}"
        for one in summary.optimizers
    )
    lines += summary.schedulers
    extra = summary.extra
    lines.append(f"extra: {extra if isinstance(extra, str) else ', '.join(extra) or 'empty'}")
    print_plainly(console, lines[0])  # a path that is cut is no path
    print_wrapped(console, lines[1:])
    for model in summary.models:
        print_plainly(console, f"\n{model['class']}")
        rows = [(t["name"], _shape(t["shape"]), t["dtype"]) for t in model["tensors"]]
        print_table(console, ("tensor", "shape", "dtype"), rows, left=3)
    sizes = [(category, bytes_text(count)) for category, count in summary.bytes.items()]
    print_table(console, ("tensors of", "size"), sizes)


def _shape(sizes: list[int]) -> str:
    return " × ".join(map(str, sizes)) or "scalar"


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
    with refusing():
        findings = convert_apex_checkpoint(src, dst)
    console = make_console()
    if explain:
        told = (f"- {f.key or 'the file'}: {f.kind}; becomes: {f.becomes}" for f in findings)
        print_wrapped(console, [src.name, *told])
    converted = sum(finding.kind.startswith(RECORD) for finding in findings)
    objects = "1 object" if converted == 1 else f"{converted} objects"
    print_plainly(console, f"{objects} made plain data: {dst}")
