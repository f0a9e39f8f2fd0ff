# SPDX-License-Identifier: BSD-3-Clause
"""From the contents of all ranks to the draft of one file."""

from __future__ import annotations

from typing import Any, cast

import torch

from preamp.checkpoint.codec import encode
from preamp.checkpoint.parts import Stored
from preamp.checkpoint.ranks import (
    check_shared,
    differing,
    fingerprints,
    gathered,
    gathered_on_first,
    rank,
    together,
    world_size,
)
from preamp.checkpoint.storage import Draft

Encoded = tuple[Any, dict[str, torch.Tensor]]


def encoded(content: Any) -> Encoded:
    """Take a content apart; see `encode` for the errors."""
    return encode(content, "the checkpoint")


def gather(own: Encoded, buffers: frozenset[str], *, copy: bool) -> Draft | None:
    """Bring what is to be written to the CPU of the first rank. Synchronises.

    Other ranks add what they have of their own: gradients that were not reduced, buffers, random
    states. Everything else they only compare with the first rank, by fingerprints.

    Args:
        own: The content of this rank.
        buffers: Names of those tensors that are buffers of models.
        copy: Whether what changes there afterwards must not change the draft.

    Returns:
        The draft on the first rank, ``None`` on the others.

    Raises:
        PreampStateError: Weights or optimizer states are not the same on all ranks.
    """
    tree, tensors = own
    if world_size() == 1:
        return Draft([tree], _stored(tensors, copy=copy))
    with together():
        prints = fingerprints(tensors)
    differences = [differing(prints_, prints_0) for prints_, prints_0 in _with_first(prints)]
    check_shared(differences, buffers)
    mine = differences[rank()]
    parts = {name: Stored.of(tensors[name], copy=False) for name in mine}
    others = gathered_on_first((_renamed(tree, set(mine), rank()), parts) if rank() else None)
    if rank():
        return None
    stored = _stored(tensors, copy=copy)
    for number, (_, added) in enumerate(others[1:], start=1):
        stored |= {_name(number, name): part for name, part in added.items()}
    return Draft([tree, *(other for other, _ in others[1:])], stored)


def _with_first(prints: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    all_prints = gathered(prints)
    return [(one, all_prints[0]) for one in all_prints]


def _stored(tensors: dict[str, torch.Tensor], *, copy: bool) -> dict[str, Stored]:
    return {name: Stored.of(tensor, copy=copy) for name, tensor in tensors.items()}


def _name(number: int, name: str) -> str:
    return f"ranks/{number}/{name}"


def _renamed(tree: Any, names: set[str], number: int) -> Any:
    """Give the tensors that are this rank's own names of their own."""
    if isinstance(tree, list):
        return [_renamed(item, names, number) for item in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    if list(entries) == ["$tensor"] and entries["$tensor"] in names:
        return {"$tensor": _name(number, entries["$tensor"])}
    return {key: _renamed(item, names, number) for key, item in entries.items()}
