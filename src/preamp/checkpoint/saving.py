# SPDX-License-Identifier: BSD-3-Clause
"""`save_checkpoint` and `load_checkpoint`, past their arguments."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from preamp.checkpoint.background import LATEST, Saving
from preamp.checkpoint.capture import capture
from preamp.checkpoint.codec import encode
from preamp.checkpoint.gathering import Encoded, gather
from preamp.checkpoint.placing import placed
from preamp.checkpoint.ranks import check_same, rank, together, world_size
from preamp.checkpoint.restore import owned, restore
from preamp.checkpoint.series import check_keep_last, instead_of, tidy
from preamp.checkpoint.storage import (
    Draft,
    Loaded,
    Reader,
    check_format,
    check_shared_folder,
    naming,
    read,
    write,
)
from preamp.checkpoint.subjects import Subjects
from preamp.core.errors import CheckpointError, bad_value, message, worded
from preamp.core.log import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save."""

    keep_last: int | None  # how many of the series to keep, or ``None``
    asynchronous: bool  # whether to write in the background


def save(path: Path, subjects: Subjects, extra: Any, options: Options) -> Saving:
    """See ``preamp.save_checkpoint``."""
    LATEST.wait()

    def content() -> Encoded:
        check_format(path)
        check_keep_last(path, options.keep_last)
        return encode(capture(subjects, extra), "the checkpoint", world_size())

    collect = gather(content, path, subjects.buffer_names())
    saving = Saving(path)
    if options.asynchronous:
        saving.start(_writing(_collected_now(collect), path, options))
        LATEST.set(saving)
    else:
        with together():
            _writing(lambda: collect(False), path, options)()
    return saving


def _collected_now(collect: Callable[[bool], Draft | None]) -> Callable[[], Draft | None]:
    """Copy what is to be written; return what returns it, or raises what has failed.

    An error of one rank is for all to learn of: with its next call, as that of a failed write.
    """
    try:
        draft = collect(True)
    except Exception as error:
        if world_size() == 1:
            raise
        failed = error

        def fail() -> NoReturn:
            raise failed

        return fail
    return lambda: draft


def _writing(
    collected: Callable[[], Draft | None], path: Path, options: Options
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
        with naming(path):
            write(draft, file, alone=options.asynchronous)
        try:
            tidy(place, options.keep_last)
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


def load(path: Path, subjects: Subjects, *, gradients: bool, rng: bool) -> Any:
    """See ``preamp.load_checkpoint``."""
    LATEST.wait()
    with together():
        loaded = read_or_refuse(path, Reader(rank=rank(), ranks=world_size()))
    check_same(path, loaded.identity)
    with together():
        if gradients and subjects.optimizers and not loaded.is_shared:
            _check_ranks(loaded)
        content = placed(loaded.content, subjects)
        extra = owned(content["extra"])
    states = content["rng"] if rng else None
    if states is not None and loaded.ranks != world_size():
        say(
            f"preamp: {path} has the random states of {loaded.ranks} ranks; those of "
            f"{world_size()} stay as they are"
        )
        states = None
    restore(content, subjects, gradients=gradients, states=states)
    return extra


def _check_ranks(loaded: Loaded) -> None:
    if loaded.ranks != world_size():
        raise bad_value(
            f"The checkpoint has gradients that {loaded.ranks} ranks had each for itself, and "
            f"there are {world_size()} now",
            "Gradients that were not reduced yet load into as many ranks; nothing was loaded",
            "Start as many, or leave the gradients out with gradients=False",
        )


def read_or_refuse(path: Path, reader: Reader | None = None) -> Loaded:
    """Read a file, or say what is wrong with it and which one to load instead."""
    try:
        return read(path, reader)
    except FileNotFoundError as error:
        text = message(
            f"There is no file {path}",
            "A file that preamp.save_checkpoint has written is loaded; nothing was",
            instead_of(path),
        )
        raise FileNotFoundError(errno.ENOENT, text) from error
    except CheckpointError as error:
        raise worded(
            CheckpointError,
            f"{path} is not loaded: {error}",
            "Complete and unchanged files of preamp.save_checkpoint are loaded; nothing was",
            instead_of(path),
        ) from error
