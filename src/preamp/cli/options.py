# SPDX-License-Identifier: BSD-3-Clause
"""Options that several commands have, each said once, and what they are turned into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, cast, get_args

import typer

from preamp.core.errors import bad_value
from preamp.policy import Policy
from preamp.policy.resolve import at_level
from preamp.policy.storage import STORAGES, Place, Storage, parse_storage

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

StorageName = Annotated[
    str, typer.Option(help=f"How masters and moments are kept: {', '.join(STORAGES)}.")
]

PlaceName = Annotated[
    str, typer.Option(help=f"Where masters and moments lie: {', '.join(get_args(Place))}.")
]

Releases = Annotated[
    bool,
    typer.Option("--release-gradients", help="Apply gradients, or send them to the host, at once."),
]


def storage_of(storage: str, place: str, releases: bool) -> Storage:
    """The `preamp.Storage` of these three; raises ``ValueError`` where one is not known."""
    if storage not in STORAGES:
        raise bad_value(
            f"--storage {storage!r} is not known",
            f"Choose {', '.join(STORAGES)}",
            "Pass for example --storage split; --place and --release-gradients go with each",
        )
    place = cast("Place", place)
    return replace(parse_storage(storage), place=place, release_gradients=releases)


NEEDS_ALL_GRADIENTS = "A dynamic loss scale needs all gradients of a step."


def keeping_gradients(policies: Mapping[str, Policy], storage: Storage) -> list[str]:
    """Names of those that cannot release gradients, though ``storage`` does."""
    releases = storage.release_gradients
    return [
        name
        for name, policy in policies.items()
        if at_level(policy, storage).release_gradients is not releases
    ]


def split_levels(text: str) -> list[str]:
    """Opt levels, separated by commas or spaces."""
    return re.split(r"[,\s]+", text.strip(", "))
