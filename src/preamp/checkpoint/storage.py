# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoint files: a manifest and tensors, in torch's zip format or in that of safetensors.

The manifest is JSON. It says which format and version this is, what the content looks like, and
for each tensor its dtype, shape, size and checksum; a checksum of its own lies beside it. Both
formats hold tensors and strings only, and are read without running anything.

A sharded checkpoint is a folder with one file of each rank, complete with the last. Files are named
``3-rank0-of2.pt``: the third save into this folder, by two ranks. Each is put in its place in one
move, so one that is there is whole, and no rank has to be told that the others are done. Files of
an earlier save are removed when all of the next one are there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.checkpoint.codec import Found, Stored, decode, describe, verified
from preamp.checkpoint.formats import cause_of, read_format, suffix_of, write_format
from preamp.checkpoint.shards import Box
from preamp.core.errors import CheckpointError, PreampError, worded
from preamp.core.files import open_regular, remove_leftovers, replacing
from preamp.core.version import __version__

_NAME = re.compile(r"(\d+)-rank(\d+)-of([1-9]\d*)\.(?:pt|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """Which file of a sharded checkpoint one is."""

    token: str  # the same in all files of one save, and in no others
    number: int  # of the save into its folder
    rank: int  # whose file it is
    ranks: int  # how many there are

    def file_in(self, folder: Path) -> Path:
        """Its path in ``folder``, whose suffix chooses the format."""
        return folder / f"{self.number}-rank{self.rank}-of{self.ranks}{suffix_of(folder)}"


def next_number(folder: Path) -> int:
    """The number of the next save into ``folder``, which need not exist."""
    return 1 + max((number for number, _ in _sets_in(folder)), default=0)


def check_shared_folder(folder: Path, member: ShardFile) -> None:
    """Raise `PreampError` unless making the folder again shows that it is the first rank's too."""
    if member.rank == 0:
        return
    try:
        folder.mkdir()
        folder.rmdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    raise worded(
        PreampError,
        f"Rank {member.rank} does not find {folder.absolute()}, which rank 0 has made",
        "The files of a sharded checkpoint are in one folder that all ranks reach by the "
        "same path; nothing that can be loaded was saved",
        "Save to a file system that all nodes share, and under one name on all ranks",
    )


def is_cut_short(folder: Path) -> bool:
    """Whether there are files of sharded checkpoints in ``folder``, and none is complete."""
    sets = _sets_in(folder)
    return bool(sets) and _newest_complete(sets) is None


def files_of(folder: Path) -> list[Path]:
    """Files of the newest complete checkpoint in ``folder``, by rank; `ValueError` without one."""
    sets = _sets_in(folder)
    complete = _newest_complete(sets)
    if complete is not None:
        return [sets[complete][rank] for rank in range(complete[1])]
    if not sets:
        raise ValueError("it is a folder without files of a checkpoint")
    number, ranks = max(sets)
    missing = (str(rank) for rank in range(ranks) if rank not in sets[number, ranks])
    shown = ", ".join(itertools.islice(missing, 8))
    raise ValueError(f"it is incomplete: of {ranks} ranks' files those of {shown} are missing")


def tidy_folder(folder: Path) -> bool:
    """Remove what is older than the newest complete checkpoint in ``folder``, and dead drafts."""
    sets = _sets_in(folder)
    complete = _newest_complete(sets)
    if complete is None:
        return False
    for key, files in sets.items():
        if key < complete:
            _unlink(files.values())
    # Not those of a later save: another rank may be about to write one.
    remove_leftovers(folder, lambda name: 0 < _number_of(name) <= complete[0])
    return True


def remove(folder: Path) -> None:
    """Remove the checkpoints in ``folder``, and itself unless something else is in it."""
    for files in _sets_in(folder).values():
        _unlink(files.values())
    with contextlib.suppress(OSError):  # another rank may do the same
        remove_leftovers(folder, lambda name: _number_of(name) > 0)
        folder.rmdir()


def _number_of(name: str) -> int:
    """The number of the save that a file is of; 0 for any other file."""
    match = _NAME.fullmatch(name)
    return 0 if match is None else int(match[1])


def _unlink(files: Any) -> None:
    for file in cast("list[Path]", list(files)):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            file.unlink()


_Sets = dict[tuple[int, int], dict[int, Path]]


def _sets_in(folder: Path) -> _Sets:
    """By number of the save and of ranks, the files of each rank."""
    found: _Sets = {}
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            number, rank, ranks = map(int, match.groups())
            found.setdefault((number, ranks), {})[rank] = folder / name
    return found


def _newest_complete(sets: _Sets) -> tuple[int, int] | None:
    complete = [
        key
        for key, files in sets.items()
        if len(files) >= key[1] and all(rank in files for rank in range(key[1]))
    ]
    return max(complete, default=None)


VERSION = 1
"""Of what is written. It changes when content would be misunderstood, not when some is added."""


class Order:
    """When checkpoints are saved, in nanoseconds: later than the one that training goes on from.

    Clocks of other machines, on which that one was saved, may be ahead.
    """

    def __init__(self) -> None:
        self._latest = 0

    def next(self) -> int:
        """The time of one that is saved now."""
        self.go_on_from(max(time.time_ns(), self._latest + 1))
        return self._latest

    def go_on_from(self, when: int) -> None:
        """A checkpoint of this time was loaded."""
        self._latest = max(self._latest, when)


_ORDER = Order()
FORMAT = "preamp checkpoint"
_MANIFEST, _DIGEST = "preamp", "preamp_sha256"


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A checkpoint that is ready to be written: the CPU has all of it."""

    trees: list[Any]  # what `encode` made of the content, of each rank
    tensors: dict[str, Stored]  # by name
    member: ShardFile | None = None  # which file of several this is, if it is one
    # Where tensors that are pieces belong in the whole ones.
    boxes: Mapping[str, Box] = field(default_factory=dict[str, Box])


def write(draft: Draft, path: Path, *, alone: bool = False) -> None:
    """Write a file; it is there in full, or what was there before still is.

    The suffix chooses the format. ``alone`` starts no threads, since the
    interpreter may be exiting. Raises `OSError` if it cannot be written.
    """
    parts = describe(draft.tensors, alone=alone)
    manifest = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "preamp": __version__,
            "torch": str(torch.__version__),
            "saved_at": _ORDER.next(),
            "trees": draft.trees,
            "parts": parts,
            **_membership(draft),
        },
        allow_nan=False,
    )
    about = {_MANIFEST: manifest, _DIGEST: hashlib.sha256(manifest.encode()).hexdigest()}
    data = {name: kept.data for name, kept in draft.tensors.items()}
    with replacing(path) as file:
        write_format(file, suffix_of(path), about, data)


def _membership(draft: Draft) -> dict[str, Any]:
    if draft.member is None:
        return {}
    boxes = {name: box.to_json() for name, box in draft.boxes.items()}
    return {"member": asdict(draft.member), "boxes": boxes}


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a file has, verified, and not put together yet."""

    manifest: dict[str, Any]  # of the file
    digest: str  # of the manifest, and with it of all checksums
    tensors: dict[str, torch.Tensor]  # by name, mapped from the file


def contents_of(file: BinaryIO, *, checksums: bool = True) -> Contents:
    """Read an open file that `write` wrote, and verify it; it may be closed then.

    ``checksums`` tells whether to read every byte; otherwise another rank does. Raises nearly
    anything for a damaged one; see `read`.
    """
    about, data = read_format(file)
    text, told = about.get(_MANIFEST), about.get(_DIGEST)
    if not isinstance(text, str):
        raise ValueError("it is a file of this format without preamp's manifest")
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != told:
        raise ValueError("the checksum of its manifest is wrong")
    manifest = cast("dict[str, Any]", json.loads(text))
    version = manifest["version"]
    if manifest["format"] != FORMAT or {type(version), type(manifest["saved_at"])} != {int}:
        raise ValueError("its manifest is of another kind")
    if version != VERSION:
        newer = ", which a newer preamp has written" if version > VERSION else ""
        raise ValueError(f"it has version {version}{newer}; version {VERSION} is known")
    return Contents(manifest, digest, verified(manifest["parts"], data, checksums=checksums))


def saved_at(path: Path) -> int | None:
    """When a file or a complete folder was saved, in nanoseconds; ``None`` if it is none of ours.

    Files say so themselves, since copies have other times.
    """
    try:
        with open_regular(files_of(path)[0] if path.is_dir() else path) as file:
            return int(json.loads(read_format(file)[0][_MANIFEST])["saved_at"])
    except Exception:  # foreign files make readers raise nearly anything
        return None


def go_on_from(loaded: Loaded) -> None:
    """What is saved from now on is newer than ``loaded``."""
    _ORDER.go_on_from(loaded.saved_at)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What was read."""

    content: dict[str, Any]  # of one rank; sharded tensors are `SavedShards`
    ranks: int  # how many there were
    is_shared: bool  # whether all had the same gradients, and knew the same about them
    saved_at: int  # when, as the writer says
    written_by: dict[str, Any]  # versions: of the content (``"version"``), of preamp and of torch
    identity: str  # the same wherever this checkpoint is read, and of no other one


def read(path: Path, rank: int = 0, ranks: int = 1) -> Loaded:
    """Read a file or sharded folder, and verify every byte.

    Its tensors are mapped from the files: copy what is to outlive them. The content is that of
    ``rank``, or of the first one if there were fewer. Where several ``ranks`` read together, each
    verifies its share of the files. Raises `CheckpointError`, which says only in which way it is
    damaged, incomplete, foreign or of a newer version; and `OSError` if it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        # That a file cannot be opened is no damage.
        alone = None if path.is_dir() else stack.enter_context(open_regular(path))
        try:
            if alone is not None:
                return _loaded([_alone(contents_of(alone))], rank)
            found: list[Contents] = []
            for number, name in enumerate(files_of(path)):
                is_mine = number % ranks == rank % ranks
                found.append(_of_several(name, number, found, checksums=is_mine))
            return _loaded(found, rank)
        except Exception as error:  # a damaged file makes readers raise nearly anything
            if _is_of_this_machine(error):
                raise
            raise CheckpointError(cause_of(error)) from error


LOADED, SHOWN = "loaded; nothing was", "shown"
"""What becomes of a good file, at the end of a sentence in an error."""

_NO_NUMBER = ("Boolean value of Tensor", "a Tensor with")
_OF_THIS_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def _is_of_this_machine(error: Exception) -> bool:
    """Whether an error says nothing of the file that was read, or has been worded already."""
    if isinstance(error, OSError):
        return error.errno in _OF_THIS_MACHINE
    return isinstance(error, (MemoryError, PreampError))


@contextlib.contextmanager
def taken_apart(purpose: str = LOADED) -> Generator[None]:
    """Let a content that is whole, but not of the form that `save_checkpoint` writes, say so.

    ``purpose`` is what becomes of files that are of this form, and did not of this one.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # torch's other errors may be of the device, or its memory.
        if isinstance(error, RuntimeError) and not str(error).startswith(_NO_NUMBER):
            raise
        raise worded(
            CheckpointError,
            f"The content of the checkpoint is of another form: {error!r}",
            f"Files of preamp.save_checkpoint are {purpose}",
            "Take another file; this one was made or changed by another program",
        ) from error


def _alone(contents: Contents) -> Contents:
    member = contents.manifest.get("member")
    if member is not None:
        raise ValueError(f"it is one of the {member['ranks']} files of a sharded checkpoint")
    return contents


def _of_several(file: Path, rank: int, before: list[Contents], *, checksums: bool) -> Contents:
    try:
        with open_regular(file) as opened:
            own = contents_of(opened, checksums=checksums)
    except Exception as error:
        if _is_of_this_machine(error):
            raise
        raise ValueError(f"in {file.name}: {cause_of(error)}") from error
    member = own.manifest.get("member")
    first: Any = before[0].manifest["member"] if before else member
    if member is None or (member["rank"], member["token"]) != (rank, first["token"]):
        raise ValueError(f"{file.name} is a file of another checkpoint")
    return own


def _loaded(found: list[Contents], rank: int) -> Loaded:
    trees = [tree for contents in found for tree in cast("list[Any]", contents.manifest["trees"])]
    tree = trees[rank if rank < len(trees) else 0]
    manifest = found[0].manifest
    return Loaded(
        content=decode(tree, _joined(found)),
        ranks=len(trees),
        is_shared=all(_pending(one) == _pending(trees[0]) for one in trees),
        saved_at=manifest["saved_at"],
        written_by={key: manifest.get(key) for key in ("version", "preamp", "torch")},
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
    """What of a tree is about gradients, but for an overflow's notes, which may differ by rank."""
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
