# SPDX-License-Identifier: BSD-3-Clause
"""Pages that are there in full, or as they were before."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Final

from preamp.core.errors import system_error
from preamp.core.files import replacing

_ALLOWED: Final = "A page goes to a file, in a folder in which files can be made"
_DO: Final = "Pass another path"


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 beside ``path``, then put it in its place in one move.

    Its folder is made where it does not exist; a link is followed. Raises `OSError` if it cannot be
    written; what was there before still is, and nothing else.
    """
    missing: list[Path] = []
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():  # a device would be gone for all programs
            raise FileExistsError(errno.EEXIST, "What is there is no regular file")
        missing += (each for each in target.parents if not each.exists())
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(text.encode("utf-8"))
    except BaseException as error:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise system_error(error, f"{path} cannot be written", _ALLOWED, _DO) from None
        raise
