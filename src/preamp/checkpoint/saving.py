# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints saved, loaded, read and found."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preamp.checkpoint.background import LATEST, Saving
from preamp.checkpoint.capture import capture
from preamp.checkpoint.codec import Stored, encode, store
from preamp.checkpoint.ranks import rank, world_size
from preamp.checkpoint.restore import owned, restore
from preamp.checkpoint.storage import ORDER, Loaded, read, saved_at, taken_apart, write
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
    """Save everything that training goes on from, between two steps.

    The file holds the models' float32 values, the optimizers' state in its own dtypes, loss scales
    and counters, schedulers, and the states of the random generators of Python, numpy and torch. A
    run that loads it goes on bitwise as the one that saved it, if that clears its gradients before
    the next backward: those that a step has used are not saved.

    The file is in the format of safetensors, whatever its name. It is written beside its place,
    flushed to the disk and then put there in one move: whatever happens meanwhile, ``path`` is the
    old file or the new one.

    Of several ranks each writes what it has, and waits for none. Where all have the same, as under
    ``DistributedDataParallel``, call this on one, or with a path for each rank, so that each gets
    its own random states back. Where ranks hold parts of tensors (``fully_shard``), use `RunState`.

    Args:
        path: The file; its folder is made.
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
        PreampStateError: Inside a ``scale_loss`` block, or after one and before the
            ``optimizer.step()`` or ``zero_grad()`` that its gradients are for; an optimizer of the
            ``initialize`` call is missing; or a rank has parts of tensors.
        PreampUnavailableError: The host has no pinned memory for copies of CUDA devices.

    Mutates:
        Nothing, except that masters take over what was written to their half weights. Synchronises:
        loss scales and counters are read, and without ``asynchronous`` the copies are waited for.
    """
    path, subjects = Path(path), Subjects.of(models, optimizers, schedulers)
    LATEST.wait()
    check_keep_last(path, keep_last)
    tree, tensors = encode(capture(subjects, extra), "the checkpoint")
    collect = store(tensors, copy=asynchronous)
    del tensors  # of devices, whose memory is not to wait for the disk
    saving = Saving(path)
    job = _writing(tree, collect, path, keep_last, alone=asynchronous)
    if asynchronous:
        saving.start(job)
        LATEST.set(saving)
    else:
        job()
    return saving


def _writing(
    tree: Any,
    collect: Callable[[], dict[str, Stored]],
    path: Path,
    keep_last: int | None,
    *,
    alone: bool,
) -> Callable[[], None]:
    place = path.absolute()  # the working directory may be another one when it is written

    def job() -> None:
        write(tree, collect(), place, alone=alone)
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
    rng: bool | None = None,
) -> Any:
    """Load what `save_checkpoint` has written, all of it or nothing.

    The file is read in full and verified before anything changes, and nothing in it is executed.
    Call ``preamp.initialize`` first. The level may be another one than that of the run that saved:
    weights and optimizer state are float32. Each rank loads for itself.

    Args:
        path: The file.
        models: As many as were saved, in the same order; mutated. Left out, none is loaded.
        optimizers: The same; with them come loss scales and counters, and gradients are dropped.
        schedulers: The same.
        rng: Set the random generators. Left out: where optimizers are given, and this process is
            the rank that saved, among as many.

    Returns:
        The ``extra`` that was saved.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read; or an earlier asynchronous save had failed, untold until now.
        CheckpointError: The file is damaged, incomplete, foreign, or of a newer version. The
            message names the newest complete checkpoint of the folder.
        ValueError: The file does not fit the objects; or random states of another rank are asked
            for.
        PreampStateError: Inside a ``scale_loss`` block, or a rank has parts of tensors.
    """
    path, subjects = Path(path), Subjects.of(models, optimizers, schedulers)
    LATEST.wait()
    loaded = _read_or_refuse(path)
    with taken_apart():
        extra = owned(loaded.content["extra"])
        sets_random = bool(subjects.optimizers) if rng is None else rng
        states = loaded.content["rng"] if sets_random else None
        if states is not None and not _is_of_this_rank(loaded, path, must_be=rng is True):
            states = None
    restore(loaded.content, subjects, states)
    ORDER.go_on_from(loaded.saved_at)
    return extra


def _is_of_this_rank(loaded: Loaded, path: Path, *, must_be: bool) -> bool:
    """Whether a file has this rank's random states; if not, that is said, or raised."""
    saved = loaded.content["ranks"]
    number, ranks = saved[0], saved[1]
    if (number, ranks) == (rank(), world_size()):
        return True
    got = f"{path} has the random states of rank {number} of {ranks}"
    if must_be:
        raise bad_value(
            f"{got}, and rng=True asks for them on rank {rank()} of {world_size()}",
            "Ranks with the same random states would draw the same numbers; nothing was loaded",
            "Leave out rng, or save a file of each rank and load it on the same number of ranks",
        )
    say(f"preamp: {got}; those of rank {rank()} stay as they are", every_rank=True)
    return False


def _read_or_refuse(path: Path) -> Loaded:
    """Read a file, or say what is wrong with it and which one to load instead."""
    try:
        return read(path)
    except FileNotFoundError as error:
        text = message(
            f"There is no file {path}",
            "A file that preamp.save_checkpoint has written is loaded; nothing was",
            _instead_of(path),
        )
        raise FileNotFoundError(errno.ENOENT, text) from error
    except CheckpointError as error:
        raise worded(
            CheckpointError,
            f"{path} is not loaded: {error}",
            "Complete and unchanged files of preamp.save_checkpoint are loaded; nothing was",
            _instead_of(path),
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify a file of ``preamp.save_checkpoint`` without any objects to load it into.

    Args:
        path: The file.

    Returns:
        The content: under ``"models"`` and ``"optimizers"`` a list of dicts with what
        ``state_dict()`` returned under ``"state"``, under ``"extra"`` what was given. Tensors are
        on the CPU and mapped from the file.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is damaged, incomplete, foreign, or of a newer version.
    """
    LATEST.join()
    return _read_or_refuse(Path(path)).content


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in ``folder`` that would load, or ``None``.

    Files are read in full to verify them, the one saved last first, until one is good. They say
    themselves when that was, later than the one that the run went on from, so copies keep their
    order. Anything else is passed over, as are drafts that a killed process has left. One that this
    process is writing in the background is waited for; of several ranks let one find it and tell
    the others.

    Args:
        folder: Where to look, not deeper. It need not exist.
    """
    LATEST.join()
    return next(_good_ones(Path(folder)), None)


_NUMBER = re.compile(r"\d+(?=\D*$)")


def _good_ones(folder: Path) -> Iterator[Path]:
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


def _instead_of(path: Path) -> str:
    """Say which checkpoint to load instead of ``path``."""
    inside = _good_ones(path) if path.is_dir() else iter(())  # a folder of checkpoints, perhaps
    others = (good for good in itertools.chain(inside, _good_ones(path.parent)) if good != path)
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
            "Put the step into the name, such as 'step_1000.safetensors'",
        )


def tidy(path: Path, keep_last: int | None) -> None:
    """Remove the oldest of the series of ``path``, which was just written, and dead drafts of it.

    ``keep_last`` are left of those whose name differs in the last number only, in the order of
    `latest_checkpoint`; ``None`` leaves all. Files that are no checkpoints stay.
    """
    pattern = _NUMBER.sub("#", path.name)
    remove_leftovers(path.parent, lambda name: _NUMBER.sub("#", name) == pattern)
    if keep_last is None:
        return
    series = [p for p in path.parent.iterdir() if _NUMBER.sub("#", p.name) == pattern and p != path]
    for old in _newest_first(series)[keep_last - 1 :]:
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
