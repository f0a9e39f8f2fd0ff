# SPDX-License-Identifier: BSD-3-Clause
"""Several checkpoints in one folder: the newest that can be loaded, and which ones to remove."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from preamp.checkpoint.storage import (
    is_checkpoint,
    is_sharded_folder,
    read,
    remove,
    tidy_folder,
    written_at,
)
from preamp.core.errors import CheckpointError, PreampUnavailableError, bad_value
from preamp.core.files import remove_leftovers

_NUMBER = re.compile(r"\d+(?=\D*$)")


def good_ones(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints in ``folder`` that can be loaded, newest first, reading all of each."""
    for path in _newest_first(folder):
        with contextlib.suppress(CheckpointError, PreampUnavailableError, OSError):
            read(path)
            yield path


def _newest_first(folder: Path) -> list[Path]:
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # Another process may have removed it, and a folder may be anything.
        with contextlib.suppress(OSError, ValueError):
            if (path.is_file() or path.is_dir()) and not path.name.startswith("."):
                found.append((written_at(path), _number_in(path.name) or 0, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _number_in(name: str) -> int | None:
    match = _NUMBER.search(name)
    return None if match is None else int(match[0])


def instead_of(path: Path) -> str:
    """Say which checkpoint to load instead of ``path``."""
    inside = good_ones(path) if path.is_dir() else iter(())  # a folder of checkpoints, perhaps
    others = (good for good in itertools.chain(inside, good_ones(path.parent)) if good != path)
    other = next(others, None)
    if other is None:
        return f"There is no other complete checkpoint in {path.parent}; take one from elsewhere"
    return f"Load {other}, the newest complete checkpoint in its folder"


def check_keep_last(path: Path, keep_last: int | None) -> None:
    """Raise `ValueError` unless it can be told which files to remove."""
    if keep_last is None:
        return
    if keep_last < 1:
        raise bad_value(
            f"keep_last is {keep_last}",
            "At least the checkpoint just written is kept: a number from 1, or None for all",
            "Pass how many of the newest to keep",
        )
    if _number_in(path.name) is None:
        raise bad_value(
            f"keep_last={keep_last} with the file name {path.name!r}",
            "Files to be removed are those whose name differs in its last number only",
            "Put the step into the name, such as 'step_1000.pt'",
        )


def tidy(path: Path, keep_last: int | None) -> None:
    """Remove the oldest of the series of ``path``, which was just written, and dead drafts of it.

    Nothing is removed while other ranks' files are missing. ``keep_last`` are left of those whose
    name differs in the last number only, by the time they were written; ``None`` leaves all. Files
    that are no checkpoints stay.
    """
    if path.is_dir() and not tidy_folder(path):
        return
    pattern = _NUMBER.sub("#", path.name)
    remove_leftovers(path.parent, lambda name: _NUMBER.sub("#", name) == pattern)
    series = [p for p in path.parent.iterdir() if _NUMBER.sub("#", p.name) == pattern]
    complete = [p for p in _newest_first(path.parent) if p in series and p != path]
    for old in series:  # of saves that were cut short
        if old not in complete and old != path and is_sharded_folder(old):
            remove(old)
    if keep_last is None:
        return
    ours = [p for p in complete if p.is_dir() or is_checkpoint(p)]  # others are not ours to remove
    for old in ours[keep_last - 1 :]:
        with contextlib.suppress(FileNotFoundError):
            remove(old) if old.is_dir() else old.unlink()
