# SPDX-License-Identifier: BSD-3-Clause
"""From the contents of all ranks to the draft of one file, or of one file for each rank."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from preamp.checkpoint.codec import Stored, Tensors
from preamp.checkpoint.ranks import (
    Print,
    check_shared,
    differing,
    exchanged,
    fingerprints,
    gathered_on_first,
    rank,
    world_size,
)
from preamp.checkpoint.shards import Box, Frame, Shard
from preamp.checkpoint.storage import Draft, ShardFile, next_number
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.files import naming

Encoded = tuple[Any, Tensors]
_Told = tuple[dict[str, Print], str, int]  # with a token, and the number of the next save


def gather(
    make: Callable[[], Encoded], path: Path, buffers: frozenset[str]
) -> Callable[[bool], Draft | None]:
    """Agree with the other ranks on what this one is to write; return what brings it to the CPU.

    Where nothing is sharded that is everything on the first rank and nothing on the others, which
    only send what they have of their own: gradients that were not reduced, buffers, random states.
    Everything else they compare with the first rank, by fingerprints. Where something is sharded
    every rank writes a file with its pieces and what it has of its own.

    ``make`` returns the content of this rank; where it fails on one rank, all raise. ``buffers``
    are the names of tensors that are buffers of models. What is returned synchronises, may fail on
    one rank alone, and returns the draft, or ``None`` on ranks that write nothing; its argument is
    whether later changes must not change the draft. Raises `PreampStateError` if weights or
    optimizer states are not the same on all ranks, copies of one piece differ, or pieces do not
    make up a tensor.
    """
    tree: Any = None
    tensors: Tensors = {}
    plain: dict[str, torch.Tensor] = {}

    def tell() -> _Told | None:
        nonlocal tree, tensors, plain
        tree, tensors = make()
        plain = {name: kept for name, kept in tensors.items() if isinstance(kept, torch.Tensor)}
        if world_size() == 1 and len(plain) == len(tensors):
            return None
        number = next_number(path) if rank() == 0 else 0
        if rank() == 0 and len(plain) < len(tensors):
            with naming(path):
                path.mkdir(parents=True, exist_ok=True)
        return fingerprints(tensors), uuid.uuid4().hex, number

    try:
        told = [one for one in exchanged(tell) if one is not None]  # the one exchange
        if not told:
            return lambda copy: Draft([tree], _stored(plain, copy=copy))
        found = _Ranks.of(told)
        check_shared(found.differences, buffers, frozenset(tensors.keys() - plain.keys()))
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty, or not there
            if rank() == 0 and len(plain) < len(tensors):
                path.rmdir()
        raise
    return lambda copy: _collected(tree, tensors, plain, found, copy=copy)


def _collected(
    tree: Any, tensors: Tensors, plain: dict[str, torch.Tensor], found: _Ranks, *, copy: bool
) -> Draft | None:
    mine = found.differences[rank()]
    if found.has_pieces:
        kept = plain if rank() == 0 else {name: plain[name] for name in mine}
        return _one_of_several(_renamed(tree, set(mine), rank()), kept, tensors, found, copy=copy)
    parts = _stored({name: plain[name] for name in mine}, copy=False)
    others = gathered_on_first((_renamed(tree, set(mine), rank()), parts) if rank() else None)
    if rank():
        return None
    stored = _stored(plain, copy=copy)
    for number, (_, added) in enumerate(others[1:], start=1):
        stored |= {_name(number, name): part for name, part in added.items()}
    return Draft([tree, *(other for other, _ in others[1:])], stored)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """What the ranks know of each other's tensors."""

    # For each rank, the names of tensors in which it differs from the first one.
    differences: list[list[str]]
    has_pieces: bool  # whether any has pieces of tensors
    token: str  # that the first rank drew
    number: int  # of the save into the folder
    pieces: list[str]  # names of those that this rank is the first to have

    @classmethod
    def of(cls, told: Sequence[_Told]) -> _Ranks:
        """Compare what all ranks have told; `PreampStateError` if pieces make up no tensor."""
        prints = [one for one, _, _ in told]
        whole = [{n: p for n, p in one.items() if not _is_piece(p)} for one in prints]
        differences = [differing(one, whole[0]) for one in whole]
        pieces = [{n: p for n, p in one.items() if _is_piece(p)} for one in prints]
        _check_whole(prints)
        own = _first_holders(pieces, differences)
        return cls(differences, any(pieces), told[0][1], told[0][2], own[rank()])


def _is_piece(print_: Print) -> bool:
    return isinstance(print_[0], Box)


def _first_holders(
    pieces: Sequence[dict[str, Print]], differences: list[list[str]]
) -> list[list[str]]:
    """For each rank, names of pieces that none before has; notes how others' copies differ."""
    known: dict[tuple[str, Any], Print] = {}
    own: list[list[str]] = []
    for one, different in zip(pieces, differences, strict=True):
        first: list[str] = []
        for name, print_ in one.items():
            if print_[0].numel == 0:
                continue
            if known.setdefault((name, print_[0]), print_) is print_:
                first.append(name)
            elif known[name, print_[0]] != print_:
                different.append(name)
        own.append(first)
    return own


def _check_whole(prints: Sequence[dict[str, Print]]) -> None:
    """Raise `PreampStateError`, on all ranks, unless pieces under each name make up one tensor."""
    known: dict[str, tuple[int, Any]] = {}
    boxes: dict[str, set[Box]] = {}
    for number, one in enumerate(prints):
        for name, (box, *form) in one.items():
            of = form[:2] if isinstance(box, Box) else None
            first, wanted = known.setdefault(name, (number, of))
            if of != wanted:
                raise _not_one_tensor(name, f"rank {first} has another tensor than rank {number}")
            if isinstance(box, Box) and box.numel:
                boxes.setdefault(name, set()).add(box)
    for name, found in boxes.items():
        frame: Frame = known[name][1][0]
        if sum(box.numel for box in found) != math.prod(frame.shape):
            raise _not_one_tensor(name, "what the ranks have overlaps, or is not all of it")


def _not_one_tensor(name: str, reason: str) -> PreampStateError:
    return bad_state(
        f"The pieces of {name!r} do not make up one tensor: {reason}",
        "Under one name ranks have pieces of the same tensor; nothing was saved",
        "Give different parts of a model different names, such as one attribute of the model "
        "for each stage of a pipeline",
    )


def _one_of_several(
    tree: Any, plain: dict[str, torch.Tensor], tensors: Tensors, found: _Ranks, *, copy: bool
) -> Draft:
    number, ranks = rank(), world_size()
    pieces = {name: cast("Shard", tensors[name]) for name in found.pieces}
    stored = {
        name if number == 0 else _name(number, name): Stored.of(tensor, copy=copy)
        for name, tensor in plain.items()
    }
    stored |= {name: Stored.of(piece.data, copy=copy) for name, piece in pieces.items()}
    member = ShardFile(token=found.token, number=found.number, rank=number, ranks=ranks)
    boxes = {name: piece.box for name, piece in pieces.items()}
    return Draft([tree], stored, member, boxes)


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
