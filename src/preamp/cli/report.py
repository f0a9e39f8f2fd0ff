# SPDX-License-Identifier: BSD-3-Clause
"""``preamp report``: records of runs in, one HTML page out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from preamp import report as pages
from preamp.cli.console import make_console, print_plainly, refusing
from preamp.core.errors import bad_value
from preamp.numerics import Record, read_history
from preamp.report.words import size


def report(
    files: Annotated[list[Path], typer.Argument(metavar="run.jsonl ...", help="Records of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Training report",
) -> None:
    """Write what happened to the numbers of a run as one HTML page; of several, side by side.

    The page needs no network and no script.
    """
    with refusing():
        if _target(output) in map(_target, files):
            raise bad_value(
                f"The page would replace {output}, which holds records",
                "The page goes to a file of its own",
                "Pass for example -o report.html",
            )
        runs = {name: _read(path) for name, path in zip(_names(files), files, strict=True)}
        pages.write(output, runs, title=title)
    print_plainly(make_console(), f"Report: {output} ({size(output.stat().st_size)})")


def _names(files: Sequence[Path]) -> list[str]:
    """Name runs after their files, or where that names two alike, after their paths."""
    names = [path.stem for path in files]
    return names if len(set(names)) == len(names) else list(map(str, files))


def _read(path: Path) -> list[Record]:
    records = read_history(path)
    if not records:
        raise bad_value(
            f"{path} holds no record",
            "A report needs at least one line that preamp wrote",
            "Pass the file that a history of a run was written to",
        )
    return records


def _target(path: Path) -> Path:
    """Where links lead; what leads in a circle is told when it is opened."""
    return Path(os.path.realpath(path))
