# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints saved, loaded, read and found."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from preamp.checkpoint.background import LATEST, Saving
from preamp.checkpoint.capture import capture
from preamp.checkpoint.codec import encode
from preamp.checkpoint.gathering import Encoded, Finish, gather
from preamp.checkpoint.placing import placed, whole
from preamp.checkpoint.ranks import check_same, rank, together, world_size
from preamp.checkpoint.restore import owned, restore
from preamp.checkpoint.storage import (
    LOADED,
    SHOWN,
    Loaded,
    check_shared_folder,
    go_on_from,
    is_cut_short,
    read,
    remove,
    saved_at,
    taken_apart,
    tidy_folder,
    write,
)
from preamp.checkpoint.subjects import Subjects
from preamp.core.errors import CheckpointError, bad_value, message, worded
from preamp.core.files import remove_leftovers
from preamp.core.log import say

Models = nn.Module | Sequence[nn.Module] | None
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def save_checkpoint(
    path: str | os.PathLike[str],
    models: Models = None,
    optimizers: Optimizers = None,
    schedulers: Any = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Save everything that training goes on from, at any point between two ``scale_loss`` blocks.

    The file holds the models' float32 values, the optimizers' state in its own dtypes, loss scales
    and counters, gradients that are there (with what is known of them, so also between
    ``scale_loss`` and ``step`` and within an accumulation), schedulers, and the states of the
    random generators of Python, numpy and torch. A run that loads it goes on bitwise as the one
    that saved it. Gradients take room: save after ``zero_grad`` where that is possible.

    The file is written beside its place, flushed to the disk and then put there in one move:
    whatever happens meanwhile, ``path`` is the old file or the new one. Where ranks hold parts of
    parameters (``fully_shard``) ``path`` is a folder into which each rank writes a file with its
    parts; complete with the last of them.

    Args:
        path: The file, or that folder; its folder is made. A name ending in ``.safetensors``
            chooses that format, any other torch's.
        models: One or several, initialized or not. Wrappers are looked through.
        optimizers: One or several; all of a ``preamp.initialize`` call.
        schedulers: One or several objects with ``state_dict`` and ``load_state_dict``.
        extra: Plain data of your own: numbers, strings, tensors, and containers of them.
        keep_last: Remove older checkpoints whose name differs from this one's in its last number
            only, up to so many of the newest, this one included; afterwards. Other files stay.
        asynchronous: Return when tensors of the CPU are copied and copies of those on CUDA devices
            are queued, and write in the background. What trains on cannot change the file. The
            next call waits for the writing to end.

    Returns:
        A handle, whose ``wait()`` returns when the file is on the disk.

    Raises:
        OSError: The file cannot be written; what was there before still is. Or it is written,
            and an older one cannot be removed. Also of the previous call, if that was asynchronous.
        TypeError: Something is no plain data, or of the wrong kind.
        ValueError: ``keep_last`` with a name without a number.
        PreampStateError: Inside a ``scale_loss`` block; an optimizer of the ``initialize`` call
            is missing; gradients lie unreduced inside of ``fully_shard``; or ranks differ in what
            they have to share.
        PreampUnavailableError: The host has no pinned memory for copies of CUDA devices.
        PreampError: Another rank has failed, or did not answer within the group's timeout.

    Mutates:
        Nothing, except that masters take over what was written to their half weights. Synchronises:
        loss scales and counters are read, and without ``asynchronous`` the copies are waited for.
    """
    path, subjects = Path(path), Subjects.of(models, optimizers, schedulers)
    LATEST.wait()

    def content() -> Encoded:
        check_keep_last(path, keep_last)
        return encode(capture(subjects, extra), "the checkpoint", world_size())

    collect = gather(content, path, subjects.buffer_names())
    saving = Saving(path)
    if asynchronous:
        saving.start(_writing(_begun(collect), path, keep_last, alone=True))
        LATEST.set(saving)
    else:
        with together():
            _writing(lambda: collect(False)(), path, keep_last)()
    return saving


def _begun(collect: Callable[[bool], Finish]) -> Finish:
    """Queue the copies of what is to be written; return what returns it, or raises what has failed.

    An error of one rank is for all to learn of: with its next call, as that of a failed write.
    """
    try:
        return collect(True)
    except Exception as error:
        if world_size() == 1:
            raise
        failed = error

        def fail() -> NoReturn:
            raise failed

        return fail


def _writing(
    collected: Finish, path: Path, keep_last: int | None, *, alone: bool = False
) -> Callable[[], None]:
    place = path.absolute()  # the working directory may be another one when it is written

    def job() -> None:
        draft = collected()
        if draft is None:  # the first rank writes
            return
        file = place
        if draft.member is not None:
            check_shared_folder(place, draft.member)
            file = draft.member.file_in(place)
        write(draft, file, alone=alone)
        try:
            tidy(place, keep_last)
        except OSError as error:
            raise _not_tidied(path, error) from error

    return job


def _not_tidied(path: Path, error: OSError) -> OSError:
    text = message(
        f"{path} is written, but {error.filename or 'something'} beside it could not be removed: "
        f"{error.strerror or error}",
        "Drafts of dead processes are removed, and with keep_last older checkpoints",
        "See to the permissions in its folder, or save without keep_last",
    )
    return OSError(error.errno or errno.EIO, text)


def load_checkpoint(
    path: str | os.PathLike[str],
    models: Models = None,
    optimizers: Optimizers = None,
    schedulers: Any = None,
    *,
    gradients: bool = True,
    rng: bool | None = None,
) -> Any:
    """Load what `save_checkpoint` has written, all of it or nothing.

    The file is read in full and verified before anything changes, and nothing in it is executed.
    Call ``preamp.initialize`` first. The level may be another one than that of the run that saved:
    weights and optimizer state are float32. So may the number of ranks, and what they share.

    Args:
        path: The file, or the folder of a sharded checkpoint.
        models: As many as were saved, in the same order; mutated. Left out, none is loaded.
        optimizers: The same; with them come loss scales, counters and gradients.
        schedulers: The same.
        gradients: Take over gradients that were pending. Otherwise there are none afterwards.
        rng: Set the random generators. Left out: where optimizers are given.

    Returns:
        The ``extra`` that was saved.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read; or an earlier asynchronous save had failed, untold until now.
        CheckpointError: The file is damaged, incomplete, foreign, or of a newer version. The
            message names the newest complete checkpoint of the folder.
        ValueError: The file does not fit the objects.
        PreampStateError: Inside a ``scale_loss`` block; or ranks load different checkpoints.
        PreampUnavailableError: The host has no pinned memory for copies to CUDA devices.
        PreampError: Another rank has failed, or did not answer within the group's timeout.
    """
    path, subjects = Path(path), Subjects.of(models, optimizers, schedulers)
    LATEST.wait()
    with together():
        loaded = read_or_refuse(path, rank(), world_size())
    check_same(path, loaded.identity)
    with together(), taken_apart():
        if gradients and subjects.optimizers and not loaded.is_shared:
            _check_ranks(loaded)
        content = placed(loaded.content, subjects, gradients=gradients)
        extra = owned(content["extra"])
        sets_random = bool(subjects.optimizers) if rng is None else rng
        states = content["rng"] if sets_random else None
    if states is not None and loaded.ranks != world_size():
        say(
            f"preamp: {path} has the random states of {loaded.ranks} ranks; those of "
            f"{world_size()} stay as they are"
        )
        states = None
    restore(content, subjects, gradients=gradients, states=states)
    go_on_from(loaded)
    return extra


def _check_ranks(loaded: Loaded) -> None:
    if loaded.ranks != world_size():
        raise bad_value(
            f"The checkpoint has gradients that {loaded.ranks} ranks had each for itself, and "
            f"there are {world_size()} now",
            "Gradients that were not reduced yet load into as many ranks; nothing was loaded",
            "Start as many, or leave the gradients out with gradients=False",
        )


def read_or_refuse(path: Path, rank: int = 0, ranks: int = 1, purpose: str = LOADED) -> Loaded:
    """Read a file, or say what is wrong with it and which one to load, or to show, instead."""
    instead = partial(instead_of, path, "Show" if purpose == SHOWN else "Load")
    try:
        return read(path, rank, ranks)
    except FileNotFoundError as error:
        text = message(
            f"There is no file {path}",
            f"A file that preamp.save_checkpoint has written is {purpose}",
            instead(),
        )
        raise FileNotFoundError(errno.ENOENT, text) from error
    except CheckpointError as error:
        raise worded(
            CheckpointError,
            f"{path} is not {purpose.partition(';')[0]}: {error}",
            f"Complete and unchanged files of preamp.save_checkpoint are {purpose}",
            instead(),
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify a file of ``preamp.save_checkpoint`` without any objects to load it into.

    Args:
        path: The file, or the folder of a sharded checkpoint.

    Returns:
        The content: under ``"models"`` and ``"optimizers"`` a list of dicts with what
        ``state_dict()`` returned under ``"state"``, under ``"extra"`` what was given. Tensors are
        on the CPU and mapped from the file; sharded ones are put together.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is damaged, incomplete, foreign, or of a newer version.
    """
    LATEST.join()
    return whole(read_or_refuse(Path(path)).content)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in ``folder`` that would load, or ``None``.

    That is a file, or the folder of a sharded one. Files are read in full to verify them, the one
    saved last first, until one is good. They say themselves when that was, later than the one that
    the run went on from, so copies keep their order. Anything else is passed over, as are drafts
    that a killed process has left, and folders that lack the file of a rank. One that this process
    is writing in the background is waited for; for the files of other ranks call its ``wait()``,
    else ranks may find different ones.

    Args:
        folder: Where to look, not deeper. It need not exist.
    """
    LATEST.join()
    return next(good_ones(Path(folder)), None)


_NUMBER = re.compile(r"\d+(?=\D*$)")


def good_ones(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints in ``folder`` that can be loaded, newest first, reading all of each."""
    for path in _newest_first(folder.iterdir() if folder.is_dir() else ()):
        with contextlib.suppress(CheckpointError, OSError):
            read(path)
            yield path


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those that are checkpoints, whole as far as can be told without reading all of them."""
    found: list[tuple[int, int, Path]] = []
    for path in paths:
        when = None if path.name.startswith(".") else saved_at(path)
        if when is not None:
            found.append((when, _number_in(path.name) or 0, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _number_in(name: str) -> int | None:
    match = _NUMBER.search(name)
    return None if match is None else int(match[0])


def instead_of(path: Path, verb: str) -> str:
    """Say which checkpoint to load instead of ``path``, or whatever else ``verb`` is."""
    inside = good_ones(path) if path.is_dir() else iter(())  # a folder of checkpoints, perhaps
    others = (good for good in itertools.chain(inside, good_ones(path.parent)) if good != path)
    other = next(others, None)
    if other is None:
        return f"There is no other complete checkpoint in {path.parent}; take one from elsewhere"
    return f"{verb} {other}, the newest complete checkpoint in its folder"


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
    name differs in the last number only, in the order of `latest_checkpoint`; ``None`` leaves all.
    Files that are no checkpoints stay.
    """
    if path.is_dir() and not tidy_folder(path):
        return
    pattern = _NUMBER.sub("#", path.name)
    remove_leftovers(path.parent, lambda name: _NUMBER.sub("#", name) == pattern)
    series = [p for p in path.parent.iterdir() if _NUMBER.sub("#", p.name) == pattern and p != path]
    for old in series:
        if is_cut_short(old):
            remove(old)
    if keep_last is None:
        return
    for old in _newest_first(series)[keep_last - 1 :]:
        with contextlib.suppress(FileNotFoundError):
            remove(old) if old.is_dir() else old.unlink()
