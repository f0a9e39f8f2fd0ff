# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there in full, or as they were before."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and then put it in its place in one move.

    Args:
        path: The file; its folder is made where it does not exist. A link is followed.
        text: In UTF-8.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
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
