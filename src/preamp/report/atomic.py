# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there in full, or as they were before."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import Final

from preamp.core.errors import system_error

_ALLOWED: Final = "A page goes to a file, in a folder in which files can be made"
_DO: Final = "Pass another path"


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and then put it in its place in one move.

    Args:
        path: The file; its folder is made where it does not exist. A link is followed.
        text: In UTF-8.

    Raises:
        OSError: It cannot be written; what was there before still is, and nothing else.
    """
    missing: list[Path] = []
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():  # a device would be gone for all programs
            raise FileExistsError(errno.EEXIST, "What is there is no regular file")
        missing += (each for each in target.parents if not each.exists())
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, text)
    except BaseException as error:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise system_error(error, f"{path} cannot be written", _ALLOWED, _DO) from None
        raise


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(path))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced, or those that a new file gets."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0o022)  # there is no way to read it without setting it
    os.umask(mask)
    return 0o666 & ~mask
