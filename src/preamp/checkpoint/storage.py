# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoint files: a manifest and tensors, in the format of safetensors.

The manifest is JSON. It says which format and version this is, what the content looks like, and
for each tensor its dtype, shape, size and checksum; a checksum of its own lies beside it. All of
it is read without running anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.checkpoint.codec import Stored, decode, describe, verified
from preamp.checkpoint.safetensors import read_strings, read_tensors, write_tensors
from preamp.core.errors import CheckpointError, PreampError, worded
from preamp.core.files import open_regular, replacing
from preamp.core.version import __version__

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


ORDER = Order()
FORMAT = "preamp checkpoint"
_MANIFEST, _DIGEST = "preamp", "preamp_sha256"


def write(tree: Any, tensors: Mapping[str, Stored], path: Path, *, alone: bool = False) -> None:
    """Write a file; it is there in full, or what was there before still is.

    ``tree`` is what `encode` made of the content, which refers to ``tensors``. ``alone`` starts no
    threads, since the interpreter may be exiting. Raises `OSError` if it cannot be written.
    """
    manifest = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "preamp": __version__,
            "torch": str(torch.__version__),
            "saved_at": ORDER.next(),
            "tree": tree,
            "parts": describe(tensors, alone=alone),
        },
        allow_nan=False,
    )
    about = {_MANIFEST: manifest, _DIGEST: hashlib.sha256(manifest.encode()).hexdigest()}
    with replacing(path) as file:
        write_tensors(file, about, {name: kept.data for name, kept in tensors.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What was read."""

    content: dict[str, Any]  # whose tensors are mapped from the file
    saved_at: int  # when, in nanoseconds, as the writer says


def read(path: Path) -> Loaded:
    """Read a file, and verify every byte.

    Its tensors are mapped from the file: copy what is to outlive it. Raises `CheckpointError`,
    which says only in which way it is damaged, foreign or of a newer version; and `OSError` if it
    cannot be opened.
    """
    if path.is_dir():
        raise CheckpointError("it is a folder")
    with open_regular(path) as file:
        try:
            return _read(file)
        except Exception as error:  # a damaged file makes readers raise nearly anything
            if _is_of_this_machine(error):
                raise
            raise CheckpointError(_cause_of(error)) from error


def _read(file: BinaryIO) -> Loaded:
    about, data = read_tensors(file)
    text, told = about.get(_MANIFEST), about.get(_DIGEST)
    if not isinstance(text, str):
        raise ValueError("it is a file of this format without preamp's manifest")
    if hashlib.sha256(text.encode()).hexdigest() != told:
        raise ValueError("the checksum of its manifest is wrong")
    manifest = cast("dict[str, Any]", json.loads(text))
    version = manifest["version"]
    if manifest["format"] != FORMAT or {type(version), type(manifest["saved_at"])} != {int}:
        raise ValueError("its manifest is of another kind")
    if version != VERSION:
        newer = ", which a newer preamp has written" if version > VERSION else ""
        raise ValueError(f"it has version {version}{newer}; version {VERSION} is known")
    content = decode(manifest["tree"], verified(manifest["parts"], data))
    return Loaded(content, manifest["saved_at"])


def saved_at(path: Path) -> int | None:
    """When a file was saved, in nanoseconds; ``None`` if it is none of ours.

    Files say so themselves, since copies have other times.
    """
    try:
        with open_regular(path) as file:
            return int(json.loads(read_strings(file)[_MANIFEST])["saved_at"])
    except Exception:  # foreign files make readers raise nearly anything
        return None


# What torch says of a tensor where a number or a mapping should be
_NO_TENSOR = ("Boolean value of Tensor", "a Tensor with", "Tensor.__contains__", "values expected")
_OF_THIS_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def _is_of_this_machine(error: Exception) -> bool:
    """Whether an error says nothing of the file that was read."""
    if isinstance(error, OSError):
        return error.errno in _OF_THIS_MACHINE
    return isinstance(error, (MemoryError, PreampError))


def _cause_of(error: Exception) -> str:
    if isinstance(error, LookupError):  # whose text is the key alone
        return f"it is of another form ({error!r})"
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def taken_apart() -> Generator[None]:
    """Let a content that is whole, but not of the form that `save_checkpoint` writes, say so."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # torch's other errors may be of the device, or its memory.
        if isinstance(error, RuntimeError) and not str(error).startswith(_NO_TENSOR):
            raise
        raise worded(
            CheckpointError,
            f"The content of the checkpoint is of another form: {error!r}",
            "Files of preamp.save_checkpoint are loaded; nothing was",
            "Take another file; this one was made or changed by another program",
        ) from error
