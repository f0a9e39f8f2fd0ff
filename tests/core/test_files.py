# SPDX-License-Identifier: BSD-3-Clause
"""A file that is replaced as a whole, on file systems that cannot do everything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from preamp.core import files
from preamp.core.files import lock, remove_leftovers, replacing


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


@pytest.mark.parametrize("has_none", [False, True], ids=["macOS", "its network disks"])
def test_macos_empties_the_memory_of_the_disk(
    has_none: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fsync`` does not, there; where the stronger call is refused it has to do."""
    calls: list[object] = []
    sync = os.fsync

    def control(handle: int, command: int) -> None:
        calls.append(command)
        if has_none:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    only = SimpleNamespace(
        F_FULLFSYNC=51, LOCK_EX=2, LOCK_NB=4, fcntl=control, flock=lambda handle, how: None
    )
    monkeypatch.setattr(files, "fcntl", only)
    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(tmp_path / "run") as file:
        file.write(b"new")
    assert calls == ([51, "file", "folder"] if has_none else [51, "folder"])


def test_without_locks_files_are_replaced_and_drafts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: nobody can tell the draft of a dead process from that of a living one."""
    monkeypatch.setattr(files, "fcntl", None)
    path, left = tmp_path / "run", tmp_path / ".run.abc.part"
    left.write_bytes(b"half")
    for content in (b"old", b"new"):
        with replacing(path) as file:
            file.write(content)
    with pytest.raises(ValueError, match="stop"), replacing(path) as file:
        raise ValueError("stop")
    remove_leftovers(tmp_path, lambda name: name == "run")
    assert path.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [left, path]
    assert lock(0) is None
