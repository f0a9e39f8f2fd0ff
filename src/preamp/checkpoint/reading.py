# SPDX-License-Identifier: BSD-3-Clause
"""From a file, or the folder of a sharded checkpoint, to one rank's content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from preamp.checkpoint.codec import Found, decode
from preamp.checkpoint.pieces import Box
from preamp.checkpoint.reader import cause_of
from preamp.checkpoint.storage import Contents, contents_of, files_of, migrated
from preamp.core.errors import CheckpointError, PreampError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads, where several do."""

    rank: int = 0  # whose content; that of the first one if there were fewer
    ranks: int = 1  # how many read together. Each verifies its share of the files.


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What was read."""

    content: dict[str, Any]  # of one rank; sharded tensors are `Pieces`
    ranks: int  # how many there were
    is_shared: bool  # whether all had the same gradients, and knew the same about them
    written_by: dict[str, Any]  # versions: of the content (``"version"``), of preamp and of torch
    identity: str  # the same wherever this checkpoint is read, and of no other one


def read(path: Path, reader: Reader | None = None) -> Loaded:
    """Read a file or sharded folder, verify every byte, and bring it to the current version.

    Its tensors are mapped from the files: copy what is to outlive them. By default the only
    ``reader`` reads. Raises `CheckpointError`, which says only in which way it is damaged,
    incomplete, foreign or of a newer version; `PreampUnavailableError` if it is in a format whose
    package is missing; and `OSError`.
    """
    who = reader or Reader()
    if not path.is_dir():
        path.open("rb").close()  # that it cannot be opened is no damage
    try:
        if not path.is_dir():
            return _loaded([_alone(contents_of(path))], who.rank)
        files = files_of(path)
        found: list[Contents] = []
        for number, file in enumerate(files):
            is_mine = number % who.ranks == who.rank % who.ranks
            found.append(_of_several(file, number, found, checksums=is_mine))
        return _loaded(found, who.rank)
    except (MemoryError, PreampError):
        raise
    except Exception as error:  # a damaged file makes readers raise nearly anything
        raise CheckpointError(cause_of(error)) from error


def _alone(contents: Contents) -> Contents:
    member = contents.manifest.get("member")
    if member is not None:
        raise ValueError(f"it is one of the {member['ranks']} files of a sharded checkpoint")
    return contents


def _of_several(file: Path, rank: int, before: list[Contents], *, checksums: bool) -> Contents:
    try:
        own = contents_of(file, checksums=checksums)
    except (MemoryError, PreampError):
        raise
    except Exception as error:
        raise ValueError(f"in {file.name}: {cause_of(error)}") from error
    member = own.manifest.get("member")
    first: Any = before[0].manifest["member"] if before else member
    if member is None or (member["rank"], member["token"]) != (rank, first["token"]):
        raise ValueError(f"{file.name} is a file of another checkpoint")
    return own


def _loaded(found: list[Contents], rank: int) -> Loaded:
    trees = [tree for contents in found for tree in cast("list[Any]", contents.manifest["trees"])]
    tree = trees[rank if rank < len(trees) else 0]
    content = migrated(decode(tree, _joined(found)), found[0].manifest["version"])
    return Loaded(
        content=content,
        ranks=len(trees),
        is_shared=all(_pending(one) == _pending(trees[0]) for one in trees),
        written_by={key: found[0].manifest.get(key) for key in ("version", "preamp", "torch")},
        identity=found[0].digest,  # it has the mark that all files of a save bear
    )


def _joined(found: list[Contents]) -> dict[str, Found]:
    """The tensors of all files by name, and of sharded ones the pieces."""
    joined: dict[str, Found] = {}
    pieces: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for contents in found:
        boxes = contents.manifest.get("boxes", {})
        for name, tensor in contents.tensors.items():
            if name in boxes:
                pieces.setdefault(name, []).append((Box.from_json(boxes[name]), tensor))
            else:
                joined[name] = tensor
    return {**joined, **pieces}


def _pending(tree: Any) -> list[Any]:
    """What of a tree is about gradients; other tensors have other names.

    Where an overflow came from is told by notes, which may differ: of sharded parameters each rank
    has looked at its parts.
    """
    return [tree.get("gradients"), _without_notes(tree.get("engines"))]


def _without_notes(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_notes(item) for item in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    return {
        key: _without_notes(item) for key, item in entries.items() if key not in ("notes", "note")
    }
