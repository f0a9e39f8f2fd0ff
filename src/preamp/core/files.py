# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there in full, or as they were before."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from preamp.core.errors import system_error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NAME_KEPT = 200  # characters of the file's name in that of its draft


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Let the `OSError` of what fails to be written say which file it was to be."""
    try:
        yield
    except OSError as error:
        raise system_error(
            error,
            f"{path} cannot be written",
            "It needs a folder that can be written to, with room for the whole file; what was "
            "there before is untouched",
            "Make room or choose another place, and try again",
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Write a draft beside ``path`` and put it in its place in one move, when the block ends well.

    Its folder is made where it does not exist; a link is followed. Yields the draft. It and its
    folder's entry are on the disk when the block has ended. If it raises, or the process dies, what
    was there before still is, and folders that were made are removed. Raises `OSError`, which names
    ``path``.
    """
    made: list[Path] = []
    with naming(path):
        try:
            # Not path.resolve(): for a circle of links that is a RuntimeError, or none at all.
            target = Path(os.path.realpath(path))
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(target.stat().st_mode):  # a device would be gone for all
                    raise FileExistsError(errno.EEXIST, "What is there is no regular file")
            made += (folder for folder in target.parents if not folder.exists())
            target.parent.mkdir(parents=True, exist_ok=True)
            with _draft_of(target) as name:
                with open(name, "wb") as file:
                    yield file
                    file.flush()
                    _sync(file.fileno())
                os.chmod(name, _mode(target))
                os.replace(name, target)
        except BaseException:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
    _sync_folder(target.parent)


def replace_text(path: Path, text: str) -> None:
    """Let ``text``, as UTF-8, be what is in a file; see `replacing`."""
    with replacing(path) as draft:
        draft.write(text.encode("utf-8"))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; `OSError`, which names it, also for pipes and devices."""
    # Without the flag a pipe is not even opened before somebody writes to it.
    more = getattr(os, "O_NONBLOCK", 0)
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | more))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        raise OSError(errno.EINVAL, "What is there is no regular file")
    except OSError as error:
        raise system_error(
            error,
            f"{path} cannot be read",
            "It has to be a file, or a link to one; a pipe or a device might never end",
            "Check the path and its permissions",
        ) from None


@contextlib.contextmanager
def _draft_of(path: Path) -> Generator[str]:
    """Make a draft and hold its lock, without which it would pass for that of a dead process."""
    is_ours = False
    while not is_ours:
        prefix = f".{path.name[:_NAME_KEPT]}."
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".part")
        if fcntl is None:
            os.close(handle)  # Windows moves no open file
            with _removing(name):
                yield name
            return
        try:
            # Another process may have taken it for a leftover before it was locked.
            is_ours = lock(handle) is not False and os.path.exists(name)
            if is_ours:
                with _removing(name):
                    yield name
        finally:
            os.close(handle)


@contextlib.contextmanager
def _removing(name: str) -> Generator[None]:
    """Remove a file if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def remove_leftovers(folder: Path, is_meant: Callable[[str], bool]) -> None:
    """Remove drafts in ``folder`` that ``is_meant`` picks and whose process has died."""
    for draft in folder.glob(".*.part") if fcntl is not None else ():
        if is_meant(draft.name[1:].rsplit(".", 2)[0]):
            with contextlib.suppress(OSError), draft.open("rb") as file:
                if lock(file.fileno()):  # the system has released its writer's
                    draft.unlink()


def lock(handle: int) -> bool | None:
    """Lock an open file; whether it could be had, or ``None`` where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Either somebody else has it, or the file system has none.
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def unlock(handle: int) -> None:
    """Give the lock up for all processes that share it."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)


def _sync(handle: int) -> None:
    """Have all of a file on the disk. On macOS ``fsync`` leaves it in the disk's own memory."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full is not None:
        # Network file systems have none of it; `os.fsync` does there what can be done.
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, full)
            return
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems sync no folders; the file is there all the same.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise system_error(
                    error,
                    f"{folder} cannot be synced",
                    "The file in it is written and in its place, and may be lost with the power",
                    "See to the disk",
                ) from error
        finally:
            os.close(handle)


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced, or those that a new file gets."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0o022)  # there is no way to read it without setting it
    os.umask(mask)
    return 0o666 & ~mask
