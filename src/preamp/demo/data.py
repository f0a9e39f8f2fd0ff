# SPDX-License-Identifier: BSD-3-Clause
"""Text to learn from that is on every machine: the standard library's own source code."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from preamp.core.errors import unavailable

EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib"}
    | {"pydoc_data", "site-packages", "test", "tests", "turtledemo"}
)
"""Installed packages, tests and generated tables: not the standard library's code proper."""

HELD_OUT_EVERY = 10  # one file in ten, by the hash of its path, is kept out of training
_SMALLEST_CORPUS = 1_000_000  # bytes; the smallest stdlib that we met has 9 million


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The two texts, as bytes."""

    train: Tensor  # concatenated training files, shape (bytes,), uint8
    held_out: Tensor  # concatenated held-out files, shape (bytes,), uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows of text and the byte that follows each position."""

    inputs: Tensor  # shape (batch, context), int64
    targets: Tensor  # shape (batch, context), int64


def read_corpus(folder: Path | None = None) -> Corpus:
    """Read the Python files below ``folder``, sorted by path, and split them by file.

    By default the folder is the running interpreter's standard library. The split depends on
    nothing but the relative paths.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for name in source_files(folder):
        (held_out if is_held_out(name) else train).extend((folder / name).read_bytes())
    if min(len(train), len(held_out) * HELD_OUT_EVERY // 2) < _SMALLEST_CORPUS:
        raise unavailable(
            f"Found {len(train):,} + {len(held_out):,} bytes of Python source in {folder}",
            f"The demo learns from at least {_SMALLEST_CORPUS:,} bytes of it",
            "Run the demo with a Python that ships its standard library as .py files",
        )
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8),
    )


def source_files(folder: Path) -> list[str]:
    """The library's own ``.py`` files below ``folder`` as relative POSIX paths, sorted."""
    names = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(name.as_posix() for name in names if not EXCLUDED_FOLDERS & set(name.parts[:-1]))


def is_held_out(name: str) -> bool:
    """Whether a file is held out: one relative POSIX path in ten, on every machine the same."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def training_batches(
    text: Tensor, *, steps: int, batch: int, context: int, seed: int
) -> Iterator[Batch]:
    """Cut windows of ``text`` (bytes, uint8) on the CPU; equal seeds give equal batches."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - context, (batch,), generator=random)
        yield windows(text, starts, context)


def part_of_batch(batch: Batch, rank: int, ranks: int) -> Batch:
    """One rank's windows of a batch, as views: ``rank``, ``rank + ranks``, and so on."""
    return Batch(inputs=batch.inputs[rank::ranks], targets=batch.targets[rank::ranks])


def held_out_batches(text: Tensor, *, count: int, batch: int, context: int) -> Iterator[Batch]:
    """Cut ``count`` windows at equal distances from ``text``, shape (bytes,), uint8; on the CPU."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    for first in range(0, count, batch):
        yield windows(text, starts[first : first + batch], context)


def windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    """Cut one window at each of ``starts``, shape (batch,), int64; targets are one byte further."""
    cut = text[starts[:, None] + torch.arange(context + 1)].long()
    return Batch(inputs=cut[:, :-1], targets=cut[:, 1:])
