# SPDX-License-Identifier: BSD-3-Clause
"""Text to learn from that is on every machine: the standard library's own source code."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
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
_SMALLEST_TEXT = 100_000  # bytes; the smallest stdlib that we met has 9 million


Batch = tuple[Tensor, Tensor]
"""Windows of text and the byte after each position, both (batch, context), int64."""


@cache
def read_text() -> tuple[Tensor, Tensor]:
    """Read the standard library's Python files: what is learnt, and what is held out, as bytes.

    Both are uint8, of files sorted by path. Which are held out follows from their paths alone.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    training, held_out = bytearray(), bytearray()
    for name in source_files(folder):
        (held_out if is_held_out(name) else training).extend((folder / name).read_bytes())
    if min(len(training), len(held_out)) < _SMALLEST_TEXT:
        raise unavailable(
            f"Found {len(training):,} + {len(held_out):,} bytes of Python source in {folder}",
            f"Needed are at least {_SMALLEST_TEXT:,} bytes of each",
            "Use a Python that ships its standard library as .py files",
        )
    first, second = (torch.frombuffer(text, dtype=torch.uint8) for text in (training, held_out))
    return first, second


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


def held_out_batches(text: Tensor, *, count: int, batch: int, context: int) -> Iterator[Batch]:
    """Cut ``count`` windows at equal distances from ``text``, shape (bytes,), uint8; on the CPU."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    for first in range(0, count, batch):
        yield windows(text, starts[first : first + batch], context)


def windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    """Cut one window at each of ``starts``, shape (batch,), int64; targets are one byte further."""
    cut = text[starts[:, None] + torch.arange(context + 1)].long()
    return cut[:, :-1], cut[:, 1:]
