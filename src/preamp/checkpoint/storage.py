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
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.checkpoint.codec import Found, ManifestEntry, Stored, decode, describe, verified
from preamp.checkpoint.reader import cause_of
from preamp.checkpoint.shards import Box
from preamp.core.errors import CheckpointError, PreampError, message, unavailable, worded
from preamp.core.files import remove_leftovers, replacing
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
        suffix = ".safetensors" if folder.suffix == ".safetensors" else ".pt"
        return folder / f"{self.number}-rank{self.rank}-of{self.ranks}{suffix}"


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


def is_sharded_folder(path: Path) -> bool:
    """Whether there are files of sharded checkpoints in ``path``, complete or not."""
    return bool(_sets_in(path))


def files_of(folder: Path) -> list[Path]:
    """Files of the newest complete checkpoint in ``folder``, by rank; `ValueError` without one."""
    sets = _sets_in(folder)
    complete = _newest_complete(sets)
    if complete is not None:
        return [sets[complete][rank] for rank in range(complete[1])]
    if not sets:
        raise ValueError("it is a folder without files of a checkpoint")
    number, ranks = max(sets)
    missing = [str(rank) for rank in range(ranks) if rank not in sets[number, ranks]]
    raise ValueError(
        f"it is incomplete: of {ranks} ranks' files those of {', '.join(missing[:8])} are missing"
    )


def written_at(path: Path) -> int:
    """When a file, or the last one of a complete folder, was written, in nanoseconds."""
    files = files_of(path) if path.is_dir() else [path]
    return max(file.stat().st_mtime_ns for file in files)


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
    complete = [key for key, files in sets.items() if set(files) >= set(range(key[1]))]
    return max(complete, default=None)


VERSION = 1
"""Of what is written. It changes when content would be misunderstood, not when some is added."""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""For each older version, what makes its content that of the next one."""


def migrated(content: Any, version: int) -> dict[str, Any]:
    """Bring ``content`` to the current version; `ValueError` if its own is newer, or none."""
    if not isinstance(content, dict):
        raise ValueError("its content is of another kind")
    migrated_content = cast("dict[str, Any]", content)
    known = (*MIGRATIONS, VERSION)
    if version not in known:
        newer = ", which a newer preamp has written" if version > VERSION else ""
        raise ValueError(f"it has version {version}{newer}; versions {known} are known")
    for step in range(version, VERSION):
        migrated_content = MIGRATIONS[step](migrated_content)
    return migrated_content


FORMAT = "preamp checkpoint"
SAFETENSORS = ".safetensors"
_MANIFEST, _DIGEST = "preamp", "preamp_sha256"
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A checkpoint that is ready to be written: the CPU has all of it."""

    trees: list[Any]  # what `encode` made of the content, of each rank
    tensors: dict[str, Stored]  # by name
    member: ShardFile | None = None  # which file of several this is, if it is one
    # Where tensors that are pieces belong in the whole ones.
    boxes: Mapping[str, Box] = field(default_factory=dict[str, Box])


def check_format(path: Path) -> None:
    """Raise `PreampUnavailableError` if ``path`` names a format whose package is missing."""
    if path.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise unavailable(
            f"{path} is to be in the format of safetensors, which is not installed",
            "Files of any other name are in torch's format, which needs nothing more",
            "Install it with pip install 'preamp[safetensors]', or choose another name",
        )


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Let the `OSError` of what fails to be written say which checkpoint it was to be."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises the second where writing fails
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [repr(error)])[0]
        text = message(
            f"{path} could not be written: {reason}",
            "A checkpoint needs a folder that can be written to, with room for the whole file; "
            "what was there before is untouched",
            "Make room or choose another place, and save again",
        )
        raise OSError(getattr(error, "errno", None) or errno.EIO, text) from error


def write(draft: Draft, path: Path, *, alone: bool = False) -> None:
    """Write a file; it is there in full, or what was there before still is.

    The suffix ``.safetensors`` chooses that format. ``alone`` starts no threads, since the
    interpreter may be exiting. Raises `OSError` if it cannot be written.
    """
    parts = describe(draft.tensors, alone=alone)
    manifest = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "preamp": __version__,
            "torch": str(torch.__version__),
            "trees": draft.trees,
            "parts": {name: asdict(part) for name, part in parts.items()},
            **_membership(draft),
        },
        allow_nan=False,
    )
    about = {_MANIFEST: manifest, _DIGEST: hashlib.sha256(manifest.encode()).hexdigest()}
    data = {name: kept.data for name, kept in draft.tensors.items()}
    with replacing(path) as file:
        if path.suffix == SAFETENSORS:
            _write_safetensors(data, about, file)
        else:
            torch.save({**about, "tensors": data}, file)


def _membership(draft: Draft) -> dict[str, Any]:
    if draft.member is None:
        return {}
    boxes = {name: box.to_json() for name, box in draft.boxes.items()}
    return {"member": asdict(draft.member), "boxes": boxes}


def _write_safetensors(
    data: Mapping[str, torch.Tensor], about: Mapping[str, str], file: BinaryIO
) -> None:
    module = cast("Any", importlib.import_module("safetensors"))
    save = cast("Any", importlib.import_module("safetensors.torch")).save_file
    try:
        save(dict(data), file.name, metadata={"format": "pt", **about})
    except module.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a file has, verified, and not put together yet."""

    manifest: dict[str, Any]  # of the file
    digest: str  # of the manifest, and with it of all checksums
    tensors: dict[str, torch.Tensor]  # by name, mapped from the file


def contents_of(path: Path, *, checksums: bool = True) -> Contents:
    """Read a file that `write` wrote, and verify it.

    ``checksums`` tells whether to read every byte; otherwise another rank does. Raises `OSError` if
    there is no such file, and nearly anything for a damaged one; see ``reading.read``.
    """
    with path.open("rb") as file:
        start, size = file.read(len(_ZIP)), os.fstat(file.fileno()).st_size
    about, data = _open(path, start, size)
    text = str(about[_MANIFEST])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != about[_DIGEST]:
        raise ValueError("the checksum of its manifest is wrong")
    manifest = cast("dict[str, Any]", json.loads(text))
    if manifest["format"] != FORMAT or not isinstance(manifest["version"], int):
        raise ValueError("its manifest is of another kind")
    parts = {name: ManifestEntry.from_json(part) for name, part in manifest["parts"].items()}
    return Contents(manifest, digest, verified(parts, data, checksums=checksums))


def is_checkpoint(path: Path) -> bool:
    """Whether a file has preamp's manifest; looks neither at that nor at the tensors."""
    try:
        with path.open("rb") as file:
            start, size = file.read(len(_ZIP)), os.fstat(file.fileno()).st_size
        return _MANIFEST in _open(path, start, size)[0]
    except Exception:  # foreign files make readers raise nearly anything
        return False


def _open(path: Path, start: bytes, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest with its checksum, and the tensors."""
    if start == _ZIP:
        content: Any = cast("Any", torch).load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
        if not isinstance(content, dict) or _MANIFEST not in content:
            raise ValueError("it is a file of torch.save without preamp's manifest")
        whole = cast("dict[str, Any]", content)
        return whole, whole["tensors"]
    if size < 8 or int.from_bytes(start, "little") > size:  # where safetensors has a length
        raise ValueError("it is in neither of the two formats")
    check_format(path.with_suffix(SAFETENSORS))
    opened = cast("Any", importlib.import_module("safetensors")).safe_open(path, framework="pt")
    with opened as file:
        about: dict[str, Any] = file.metadata() or {}
        if _MANIFEST not in about:
            raise ValueError("it is a file of safetensors without preamp's manifest")
        return about, {name: file.get_tensor(name) for name in file.keys()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads, where several do."""

    rank: int = 0  # whose content; that of the first one if there were fewer
    ranks: int = 1  # how many read together. Each verifies its share of the files.


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What was read."""

    content: dict[str, Any]  # of one rank; sharded tensors are `SavedShards`
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
