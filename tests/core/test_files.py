# SPDX-License-Identifier: BSD-3-Clause
"""A file that is replaced as a whole, on file systems that cannot do everything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from preamp.core.files import replacing


@pytest.mark.skipif(os.name != "posix", reason="only there folders are synced")
@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(
    code: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems answer EINVAL; the file is written. A broken disk is told."""
    sync = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "run"

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")

    if fails:
        with pytest.raises(OSError, match=os.strerror(code)):
            write()
    else:
        write()
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
