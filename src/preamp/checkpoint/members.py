# SPDX-License-Identifier: BSD-3-Clause
"""The folder that a sharded checkpoint is: one file of each rank, and complete with the last.

Files are named ``3-rank0-of2.pt``: the third save into this folder, by two ranks. Each is put in
its place in one move, so one that is there is whole, and no rank has to be told that the others are
done. Files of an earlier save are removed when all of the next one are there.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from preamp.core.errors import PreampError, message
from preamp.core.files import remove_leftovers

_NAME = re.compile(r"(\d+)-rank(\d+)-of([1-9]\d*)\.(?:pt|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which file of a sharded checkpoint one is."""

    token: str  # the same in all files of one save, and in no others
    number: int  # of the save into its folder
    rank: int  # whose file it is
    ranks: int  # how many there are

    def file_in(self, folder: Path) -> Path:
        """Its path in ``folder``, whose suffix chooses the format."""
        suffix = ".safetensors" if folder.suffix == ".safetensors" else ".pt"
        return folder / f"{self.number}-rank{self.rank}-of{self.ranks}{suffix}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def next_number(folder: Path) -> int:
    """The number of the next save into ``folder``, which need not exist."""
    return 1 + max((number for number, _ in _sets_in(folder)), default=0)


def check_shared_folder(folder: Path, member: Member) -> None:
    """Raise `PreampError` unless the first rank, which has made it, and this one have one folder.

    Making it again tells: looking might show what a network file system remembers.
    """
    if member.rank == 0:
        return
    try:
        folder.mkdir()
        folder.rmdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    raise PreampError(
        message(
            f"Rank {member.rank} does not find {folder.absolute()}, which rank 0 has made",
            "The files of a sharded checkpoint are in one folder that all ranks reach by the "
            "same path; nothing that can be loaded was saved",
            "Save to a file system that all nodes share, and under one name on all ranks",
        )
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
    """When a checkpoint was written, in nanoseconds: a file, or the last one of a folder.

    Raises `ValueError` for a folder without a complete checkpoint, `OSError` if it is gone.
    """
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
