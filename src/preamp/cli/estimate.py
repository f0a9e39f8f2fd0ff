# SPDX-License-Identifier: BSD-3-Clause
"""``preamp estimate``: memory by category, for every opt level, without allocating it."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

import preamp
from preamp.cli.console import (
    make_console,
    only_answer_on_stdout,
    print_table,
    print_wrapped,
    refusing,
)
from preamp.cli.options import (
    NEEDS_ALL_GRADIENTS,
    AsJson,
    PlaceName,
    Releases,
    StorageName,
    keeping_gradients,
    split_levels,
    storage_of,
)
from preamp.core.errors import PreampError, bad_value
from preamp.memory.estimates import MemoryEstimate, fitting
from preamp.memory.layout import Factory
from preamp.memory.optimizers import name_of, parse_call
from preamp.memory.text import bytes_text, storages_text
from preamp.optim.fused.kinds import twin_of
from preamp.policy import resolve
from preamp.policy.resolve import at_level
from preamp.policy.storage import FULL, STORAGES, Storage, storage_code, storage_name

_OF_A_COLUMN = {
    "more in step": "More in step: while the optimizer steps, gradients of masters are made in "
    "float32, and split masters are put together.",
    "staging": "Staging is memory of the host for what is on its way.",
}
_CAPTION = "What is 0 at every level is left out. Activations are not counted."

_FIT = ("level", "masters", "moments", "release_\ngradients", "place", "card", "host")
_NOTHING = "Nothing fits: no level with any storage keeps as little."
_ON_TOP = "Activations, what is accumulated, saves and loads come on top."


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
    place: PlaceName = "device",
    releases: Releases = False,
    card: Annotated[
        float | None, typer.Option("--card-gib", help="GiB of the device: tell what fits.")
    ] = None,
    host: Annotated[
        float, typer.Option("--host-gib", help="GiB of the host, for what fits.")
    ] = math.inf,
    world_size: Annotated[int | None, typer.Option(help="Ranks; 1 if left out.")] = None,
    sharding: Annotated[str, typer.Option(help="none or fsdp.")] = "none",
    as_json: AsJson = False,
) -> None:
    """Tell how much memory training takes on each rank, by opt level and category.

    Nothing of the model's size is allocated. Activations are not counted; preamp.estimate does so
    if it is given a batch.
    """
    with refusing(TypeError), only_answer_on_stdout(is_wanted=as_json):
        what, kept = _model(model, params), storage_of(storage, place, releases)
        _check_card(card, host, kept)
        named = None if optimizer.lower() == "none" else optimizer
        names = _levels(levels, kept)
        ranks = _ranks(sharding, world_size)

        def look(optimizer: str | None) -> list[MemoryEstimate]:
            if card is not None:
                room = {"card": card * 2**30, "host": host * 2**30}
                return [*fitting(what, optimizer, names, **room, **ranks)]
            policies = [resolve(name, {"storage": kept}) for name in names]
            return [preamp.estimate(what, policy, optimizer, **ranks) for policy in policies]

        found = look(named)
        by_twin = [] if as_json else _by_twin(named, look)
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in found], indent=2))
    else:
        _tell(found, by_twin, named, is_searched=card is not None)
        _tell_what_is_left_out(levels, kept)


def _by_twin(
    optimizer: str | None, look: Callable[[str], list[MemoryEstimate]]
) -> list[MemoryEstimate]:
    """The same of the fused optimizer of the same update; empty where there is none."""
    fused = _twin_of(optimizer)
    try:
        return look(fused) if fused else []
    except (ValueError, TypeError, PreampError):  # it does not take what this one was given
        return []


def _tell(
    found: list[MemoryEstimate],
    by_twin: list[MemoryEstimate],
    named: str | None,
    *,
    is_searched: bool,
) -> None:
    console, fused = make_console(), _twin_of(named)
    if not is_searched:
        _print(found, console)
        with_masters = [one for one in by_twin if one.masters and one.smaller]
        if with_masters:
            most = storages_text(max(with_masters, key=lambda one: len(one.smaller)))
            print_wrapped(console, [f"{fused} makes the update of {name_of(named)}. {most}"])
        return
    print_wrapped(console, [_NOTHING] * (not found))
    _print_fits(found, console)
    known = {one.opt_level for one in found}
    others = [one for one in by_twin if one.opt_level not in known]
    if others:
        print_wrapped(console, [f"With {fused} in place of {name_of(named)} there is:"])
        _print_fits(others, console)
    print_wrapped(console, [_ON_TOP])


def _tell_what_is_left_out(levels: str | None, storage: Storage) -> None:
    keeping = keeping_gradients(preamp.OPT_LEVELS, storage)
    if levels is None and keeping:
        text = f"Left out: {', '.join(keeping)}. {NEEDS_ALL_GRADIENTS}"
        print_wrapped(make_console(), [text])


def _ranks(sharding: str, world_size: int | None) -> dict[str, Any]:
    if sharding == "fsdp" and world_size is None:
        raise bad_value(
            "Got --sharding fsdp without --world-size",
            "Shared out is between ranks, and one rank has everything",
            "Pass for example --world-size 8",
        )
    return {"world_size": 1 if world_size is None else world_size, "sharding": sharding}


def _check_card(card: float | None, host: float, storage: Storage) -> None:
    if card is not None and not card > 0:  # nan is refused, too
        raise bad_value(
            f"Got --card-gib {card:g}",
            "A card has more than 0 GiB",
            "Pass for example --card-gib 80",
        )
    if not host >= 0:
        raise bad_value(
            f"Got --host-gib {host:g}",
            "A host has 0 GiB for training, or more",
            "Pass for example --host-gib 64",
        )
    if card is None and host < math.inf:
        raise bad_value(
            "Got --host-gib without --card-gib",
            "What fits is looked for on a card and a host together",
            "Pass --card-gib as well",
        )
    if card is not None and storage != FULL:
        raise bad_value(
            f"Got --card-gib and {storage_code(storage_name(storage))}",
            "With --card-gib the storages that fit are looked for",
            "Leave one of the two out",
        )


def _twin_of(optimizer: str | None) -> str | None:
    """The fused optimizer of the same update, with the same arguments."""
    fused = twin_of(name_of(optimizer))
    if fused is None or optimizer is None:
        return None
    return "".join([fused, *optimizer.partition("(")[1:]])


def _print_fits(found: Iterable[MemoryEstimate], console: Console) -> None:
    """Print a sentence for each level and place, and a table of what takes less than these."""
    less: list[MemoryEstimate] = []
    for _, (first, *others) in groupby(found, lambda one: (one.opt_level, one.place)):
        host = f", {bytes_text(first.on_host)} on the host" if first.place == "host" else ""
        kept = f"{bytes_text(first.on_device)} on the device{host}"
        code = storage_code(first.storage)
        print_wrapped(console, [f"{first.opt_level} with storage={code}: {kept}."])
        less += others
    if less:
        console.print("\nLess is kept with these arguments of preamp.Storage:", highlight=False)
        print_table(console, _FIT, map(_fit_cells, less), left=len(_FIT) - 2)


def _fit_cells(memory: MemoryEstimate) -> list[str]:
    kept = STORAGES.get(memory.storage) or Storage(**parse_call(memory.storage).kwargs)
    masters = kept.masters if memory.masters else "–"
    arguments = masters, kept.moments, str(kept.release_gradients), kept.place
    host = bytes_text(memory.on_host) if kept.place == "host" else "–"
    return [memory.opt_level, *arguments, bytes_text(memory.on_device), host]


def _levels(levels: str | None, storage: Storage) -> list[str]:
    if levels is not None:
        return split_levels(levels)
    return [
        name for name, policy in preamp.OPT_LEVELS.items() if at_level(policy, storage) == storage
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
    every = dict.fromkeys(name for row in rows for name in row.categories)
    columns = {name: [row.categories.get(name, 0) for row in rows] for name in every}
    if first.place == "host":
        columns["card"] = [row.on_device for row in rows]
        columns["host"] = [row.on_host for row in rows]
    else:
        columns["total"] = [row.total for row in rows]
    columns["staging"] = [row.staging for row in rows]
    columns["more in step"] = [row.master_gradients for row in rows]
    filled = {name: sizes for name, sizes in columns.items() if any(sizes) or name == "total"}
    headings = ["\n".join(name.split(maxsplit=1)) for name in filled]
    names = [row.opt_level for row in rows]
    cells = zip(names, *(map(bytes_text, sizes) for sizes in filled.values()), strict=True)
    print_table(console, ["level", *headings], cells)
    of_columns = [text for name, text in _OF_A_COLUMN.items() if name in filled]
    print_wrapped(console, [" ".join([*of_columns, _CAPTION])])
    print_wrapped(console, (storages_text(row) for row in rows if row.masters and row.smaller))
