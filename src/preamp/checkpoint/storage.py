# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoint files: a manifest and tensors, in torch's zip format or in that of safetensors.

The manifest is JSON. It says which format and version this is, what the content looks like, and
for each tensor its dtype, shape, size and checksum; a checksum of its own lies beside it. Both
formats hold tensors and strings only, and are read without running anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.checkpoint.codec import Part, Stored, describe, verified
from preamp.checkpoint.members import Member
from preamp.checkpoint.pieces import Box
from preamp.core.errors import message, unavailable
from preamp.core.files import replacing
from preamp.core.version import __version__

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
    member: Member | None = None  # which file of several this is, if it is one
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
            "parts": {name: part.to_json() for name, part in parts.items()},
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
    return {"member": draft.member.to_json(), "boxes": boxes}


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
    parts = {name: Part.from_json(part) for name, part in manifest["parts"].items()}
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
