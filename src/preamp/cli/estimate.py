# SPDX-License-Identifier: BSD-3-Clause
"""``preamp estimate``: memory by category, for every opt level, without allocating it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from rich.console import Console
from typer import Argument, Option, echo

import preamp
from preamp.cli.console import make_console, print_table, print_wrapped, refusing
from preamp.core.errors import PreampError, bad_value
from preamp.memory.estimates import MemoryEstimate, fitting
from preamp.memory.layout import Factory
from preamp.memory.optimizers import name_of, parse_call
from preamp.memory.text import bytes_text, storages_text
from preamp.optim.fused.kinds import twin_of
from preamp.policy import resolve
from preamp.policy.resolve import at_level
from preamp.policy.storage import (
    FULL,
    STORAGES,
    Place,
    Storage,
    parse_storage,
    storage_code,
    storage_name,
)

_OF_A_COLUMN = {
    "more in step": "More in step: while the optimizer steps, gradients of masters are made in "
    "float32.",
    "staging": "Staging is memory of the host for what is on its way.",
}
_CAPTION = "What is 0 at every level is left out. Activations are not counted."

_FIT = ("level", "masters", "moments", "release_\ngradients", "place", "card", "host")
_NOTHING = "Nothing fits: no level with any storage keeps as little."
_ON_TOP = "Activations, what is accumulated, saves and loads come on top."


def estimate(
    model: Annotated[
        str | None, Argument(help='Its factory: package.module:name, or "torch.nn:Linear(9, 9)".')
    ] = None,
    params: Annotated[
        float | None, Option(help="Number of parameters in place of a model, as 7e9.")
    ] = None,
    optimizer: Annotated[
        str, Option(help='Name, "SGD(momentum=0.9)", package.module:Name, or none.')
    ] = "AdamW",
    levels: Annotated[
        str | None, Option(help="Opt levels; all that can have the storage by default.")
    ] = None,
    storage: Annotated[
        str, Option(help=f"How masters and moments are kept: {', '.join(STORAGES)}.")
    ] = "full",
    place: Annotated[
        str, Option(help=f"Where masters and moments lie: {', '.join(get_args(Place))}.")
    ] = "device",
    releases: Annotated[
        bool, Option("--release-gradients", help="Send gradients to the host.")
    ] = False,
    card: Annotated[
        float | None, Option("--card-gib", help="GiB of the device: tell what fits.")
    ] = None,
    host: Annotated[float, Option("--host-gib", help="GiB of the host, for what fits.")] = math.inf,
    world_size: Annotated[int | None, Option(help="Ranks; 1 if left out.")] = None,
    sharding: Annotated[str, Option(help="none or fsdp.")] = "none",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how much memory training takes on each rank, by opt level and category.

    Nothing of the model's size is allocated. Activations are not counted; preamp.estimate does so
    if it is given a batch.
    """
    # What a factory prints is no part of the JSON.
    own_output = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with refusing(TypeError), own_output:
        what, kept = _model(model, params), _storage(storage, place, releases)
        _check_card(card, host, kept)
        named = None if optimizer.lower() == "none" else optimizer
        wanted = _levels(levels, kept), kept, _ranks(sharding, world_size)
        look = partial(_look, what, wanted, None if card is None else (card, host))
        found, fused, by_twin = look(named), _twin_of(named), list[MemoryEstimate]()
        if fused is not None and not as_json:
            with contextlib.suppress(ValueError, TypeError, PreampError):  # for other arguments
                by_twin = look(fused)
    if as_json:
        echo(json.dumps([one.to_json() for one in found], indent=2))
        return
    if card is None:
        _tell(found, by_twin, f"{fused} makes the update of {name_of(named)}.")
    else:
        _tell_fits(found, by_twin, f"With {fused} in place of {name_of(named)} there is:")


def _look(
    what: Factory | float,
    wanted: tuple[list[str], Storage, dict[str, Any]],
    room: tuple[float, float] | None,
    optimizer: str | None,
) -> list[MemoryEstimate]:
    """Estimates with an optimizer: of levels with a storage, or of all that fits the room."""
    levels, storage, ranks = wanted
    if room is not None:
        card, host = (size * 2**30 for size in room)
        return [*fitting(what, optimizer, levels, card=card, host=host, **ranks)]
    policies = [resolve(level, {"storage": storage}) for level in levels]
    return [preamp.estimate(what, policy, optimizer, **ranks) for policy in policies]


def _tell(found: list[MemoryEstimate], by_twin: list[MemoryEstimate], twin: str) -> None:
    console = make_console()
    _print(found, console)
    with_masters = [one for one in by_twin if one.masters and one.smaller]
    if with_masters:
        most = storages_text(max(with_masters, key=lambda one: len(one.smaller)))
        print_wrapped(console, [f"{twin} {most}"])


def _tell_fits(found: list[MemoryEstimate], by_twin: list[MemoryEstimate], twin: str) -> None:
    console, known = make_console(), {one.opt_level for one in found}
    print_wrapped(console, [_NOTHING] * (not found))
    _print_fits(found, console)
    others = [one for one in by_twin if one.opt_level not in known]
    if others:
        print_wrapped(console, [twin])
        _print_fits(others, console)
    print_wrapped(console, [_ON_TOP])


def _storage(storage: str, place: str, releases: bool) -> Storage:
    if storage not in STORAGES:
        raise bad_value(
            f"--storage {storage!r} is not known",
            f"Choose {', '.join(STORAGES)}",
            "Pass for example --storage split; --place and --release-gradients go with each",
        )
    place = cast("Place", place)
    return replace(parse_storage(storage), place=place, release_gradients=releases)


def _ranks(sharding: str, world_size: int | None) -> dict[str, Any]:
    if sharding == "fsdp" and world_size is None:
        raise bad_value(
            "Got --sharding fsdp without --world-size",
            "Shared out is between ranks, and one rank has everything",
            "Pass for example --world-size 8",
        )
    return {"world_size": 1 if world_size is None else world_size, "sharding": sharding}


def _check_card(card: float | None, host: float, storage: Storage) -> None:
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
        return re.split(r"[,\s]+", levels.strip(", "))
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
    return partial(call.import_function(), *call.args, **call.kwargs)


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
