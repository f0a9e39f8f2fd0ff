# SPDX-License-Identifier: BSD-3-Clause
"""``preamp estimate``: memory by category, for every opt level, without allocating it."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

import preamp
from preamp.cli.console import (
    StorageName,
    make_console,
    only_answer_on_stdout,
    print_table,
    print_wrapped,
    refused,
)
from preamp.core.errors import PreampError, bad_value
from preamp.planning.layout import Factory
from preamp.planning.memory import MemoryEstimate, Sharding
from preamp.planning.optimizers import parse_call
from preamp.planning.report import bytes_text, storages_text
from preamp.policy import resolve
from preamp.policy.storage import parse_storage

_CAPTION = (
    "More in step: float32 gradients of masters while the optimizer steps, and masters that are "
    "split. What is 0 at every level is left out. Activations are not counted."
)


def estimate(
    model: Annotated[
        str | None,
        typer.Argument(
            help='Factory of the model: package.module:name, or "torch.nn:Linear(9, 9)".'
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="Number of parameters in place of a model, as 7e9.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help='Name, "SGD(momentum=0.9)", package.module:Name, or none.')
    ] = "AdamW",
    levels: Annotated[
        str | None, typer.Option(help="Opt levels; all that can have the storage by default.")
    ] = None,
    storage: StorageName = "full",
    world_size: Annotated[int, typer.Option(help="Ranks.")] = 1,
    sharding: Annotated[str, typer.Option(help="none, zero1 or fsdp.")] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how much memory training takes on each rank, by opt level and category.

    Nothing of the model's size is allocated. Activations are not counted; preamp.estimate does so
    if it is given a batch.
    """
    try:
        with only_answer_on_stdout(is_wanted=as_json):
            what = _model(model, params)
            found = [
                preamp.estimate(
                    what,
                    resolve(level, {"storage": storage}),
                    None if optimizer.lower() == "none" else optimizer,
                    world_size=world_size,
                    sharding=cast("Sharding", sharding),
                )
                for level in _levels(levels, storage)
            ]
    except (ValueError, TypeError, PreampError) as error:
        raise refused(error) from None
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in found], indent=2))
    else:
        _print(found, make_console())


def _levels(levels: str | None, storage: str) -> list[str]:
    if levels is not None:
        return re.split(r"[,\s]+", levels.strip(", "))
    needs_masters = parse_storage(storage).masters == "split"
    return [
        name
        for name, policy in preamp.OPT_LEVELS.items()
        if policy.master_weights or not needs_masters
    ]


def _model(model: str | None, params: float | None) -> Factory | float:
    if (model is None) == (params is None):
        got = "neither a model nor" if model is None else "both a model and"
        raise bad_value(
            f"Got {got} --params",
            "One of them says what is estimated",
            "Call preamp estimate package.module:name, or preamp estimate --params 7e9",
        )
    if model is None:
        return cast("float", params)
    folder = str(Path.cwd())
    if folder not in sys.path:  # as python -m does
        sys.path.insert(0, folder)
    call = parse_call(model)
    return functools.partial(call.import_function(), *call.args, **call.kwargs)


def _print(rows: list[MemoryEstimate], console: Console) -> None:
    first = rows[0]
    title = f"{first.parameters:,} parameters, {first.optimizer}"
    if first.world_size > 1:
        title += f", one of {first.world_size} ranks, sharding {first.sharding}"
    if first.storage != "full":
        title += f", storage {first.storage}"
    console.print(f"{title}\n", style="italic", highlight=False, markup=False)
    columns = {name: [row.categories[name] for row in rows] for name in first.categories}
    columns["total"] = [row.total for row in rows]
    columns["more in step"] = [row.master_gradients for row in rows]
    filled = {name: sizes for name, sizes in columns.items() if any(sizes) or name == "total"}
    headings = ["\n".join(name.split(maxsplit=1)) for name in filled]
    names = [row.opt_level for row in rows]
    cells = zip(names, *(map(bytes_text, sizes) for sizes in filled.values()), strict=True)
    print_table(console, ["level", *headings], cells)
    print_wrapped(
        console, [_CAPTION, *(storages_text(row) for row in rows if row.masters and row.smaller)]
    )
