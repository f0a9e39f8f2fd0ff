# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there in full, or as they were before."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NAME_KEPT = 200  # characters of the file's name in that of its draft


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Write a draft beside ``path`` and put it in its place in one move, when the block ends well.

    Its folder is made where it does not exist; a link is followed. Yields the draft, open for
    writing; its ``name`` is its path. The draft and its folder's entry are on the disk when the
    block has ended. If it raises, or the process dies, what was there before still is. Raises
    `OSError`.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # a device would be gone for all programs
        raise FileExistsError(errno.EEXIST, "What is there is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _draft_of(path) as name:
        try:
            with open(name, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, _mode(path))
            os.replace(name, path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def _draft_of(path: Path) -> Generator[str]:
    """Make a draft and hold its lock, without which it would pass for that of a dead process."""
    is_ours = False
    while not is_ours:
        prefix = f".{path.name[:_NAME_KEPT]}."
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".part")
        if fcntl is None:
            os.close(handle)  # Windows moves no open file
            yield name
            return
        try:
            # Another process may have taken it for a leftover before it was locked.
            is_ours = lock(handle) is not False and os.path.exists(name)
            if is_ours:
                yield name
        finally:
            os.close(handle)


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


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems sync no folders; the file is there all the same.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced, or those that a new file gets."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0o022)  # there is no way to read it without setting it
    os.umask(mask)
    return 0o666 & ~mask
