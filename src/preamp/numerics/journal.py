# SPDX-License-Identifier: BSD-3-Clause
"""A file that lines are appended to, by one writer at a time."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from types import ModuleType

from preamp.core.errors import bad_state

locks: ModuleType | None
try:
    import fcntl as locks
except ImportError:  # a system without
    locks = None

_TAKEN = (errno.EACCES, errno.EAGAIN)


class Journal:
    """An open file of lines; whoever opens it has it alone until it is closed.

    Each line is one write, so that a killed process leaves whole lines and at most one half one,
    which is removed when the file is opened next. A file that did not exist and got no line is
    removed again. Where the system has no file locks, nobody checks for other writers.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``, and the folder it is in.

        Raises:
            PreampStateError: Somebody else writes to it.
            OSError: It cannot be opened.
        """
        path = self._path = path.absolute()  # the process may change its folder
        path.parent.mkdir(parents=True, exist_ok=True)
        file, self._is_new = _open(path)
        try:
            self._size = _remove_partial_line(file)
        except BaseException:
            os.close(file)
            raise
        self._file: int | None = file
        # Closes the file of an engine that is dropped without close().
        self._finalizer = weakref.finalize(self, _release, file, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether lines can be added."""
        return self._file is not None

    def append(self, line: str) -> None:
        """Write ``line``, which ends in a newline; all of it or nothing.

        Raises:
            PreampStateError: The file was closed, or somebody has removed it.
            OSError: It could not be written, for example because the disk is full.
        """
        if self._file is None:
            raise bad_state(
                f"A record was added to {self._path} after it was closed",
                "A history takes records until close(), or until its engine is closed",
                "Add it earlier, or open a new History with this path",
            )
        if os.fstat(self._file).st_nlink == 0 and not _is_at(self._file, self._path):
            raise bad_state(
                f"{self._path} was removed while records are written to it",
                "The file stays until its engine is closed; it may be moved, not removed",
                "Initialize with another path; what was written to this one is gone",
            )
        content = line.encode("utf-8")
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
        except BaseException:
            os.ftruncate(self._file, self._size)
            raise
        self._size += written

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            # Still under the lock, so nobody else can have begun to write to it.
            if self._is_new and os.fstat(file).st_size == 0 and _is_at(file, self._path):
                self._path.unlink()
        finally:
            self._finalizer()


def _open(path: Path) -> tuple[int, bool]:
    """Open and lock the file that lies at ``path``; also tell whether this has created it.

    Before it is locked, another process may write to it, or remove it as empty.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    while True:
        try:
            file, is_new = os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            file, is_new = os.open(path, flags, 0o666), False
        try:
            _lock(file, path)
            if _is_at(file, path):
                return file, is_new
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether ``file`` is what lies at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _release(file: int, owner: int) -> None:
    # Processes forked meanwhile share the lock: they would keep it, and must not give it up.
    if locks is not None and os.getpid() == owner:
        locks.flock(file, locks.LOCK_UN)
    os.close(file)


def _lock(file: int, path: Path) -> None:
    if _is_locked(file):
        gc.collect()  # an engine that is gone may be in a reference cycle, its file still open
        if _is_locked(file):
            raise bad_state(
                f"The history {path} is being written already, by another engine or process",
                "Each engine has a file of its own",
                "Pass another path, or call close() on the engine that writes to it",
            )


def _is_locked(file: int) -> bool:
    if locks is None:
        return False
    try:
        locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN  # other errors: a file system without locks
    return False


def _remove_partial_line(file: int) -> int:
    """Remove what follows the last newline; returns the size of the rest."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - (1 << 16))
        os.lseek(file, start, os.SEEK_SET)
        newline = os.read(file, end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return end
