# SPDX-License-Identifier: BSD-3-Clause
"""Links that stay behind, steps that are taken back, messages in three parts, lines said once."""

import copy
import errno
import os
import pickle
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preamp.core import files, log, ranks
from preamp.core.errors import (
    LossScaleError,
    PreampError,
    PreampPolicyError,
    PreampStateError,
    PreampUnavailableError,
    with_article,
)
from preamp.core.files import lock, remove_leftovers, replacing
from preamp.core.link import Link
from preamp.core.tensors import find_again
from preamp.core.undo import UndoStack, set_attribute

# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [PreampStateError, PreampPolicyError, PreampUnavailableError, LossScaleError]
)
def test_errors_are_runtime_errors(error: type[Exception]) -> None:
    assert issubclass(error, PreampError)
    assert issubclass(error, RuntimeError)


@pytest.mark.parametrize(
    ("article", "nouns"),
    [
        ("an", "AdamW Adam ASGD SGD LBFGS RMSprop NAdam FP16_Optimizer int OrderedDict Unflatten"),
        ("a", "FusedAdam LARC LAMB NoneType list Tensor str float16 UnitNorm uint8 UserList"),
    ],
)
def test_names_get_the_article_that_is_spoken(article: str, nouns: str) -> None:
    for noun in nouns.split():
        assert with_article(noun) == f"{article} {noun}"


# -- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda link: pickle.loads(pickle.dumps(link))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_a_link_refer_to_nothing(duplicate: Callable[[Any], Any]) -> None:
    link = Link(object())
    twin = duplicate(link)
    assert type(twin) is Link
    assert twin.target is None
    assert link.target is not None


# -- undo ------------------------------------------------------------------------------------


class Thing:
    colour = "of the class"


def test_undo_goes_on_after_an_error_and_raises_the_first() -> None:
    done: list[int] = []
    undo = UndoStack()

    def fail(error: BaseException) -> None:
        raise error

    undo.push(lambda: done.append(1))
    undo.push(lambda: fail(ValueError("second")))
    undo.push(lambda: done.append(2))
    undo.push(lambda: fail(KeyboardInterrupt("first")))

    undo.hold(SimpleNamespace(remove=lambda: done.append(3)))
    with pytest.raises(KeyboardInterrupt, match="first"):
        undo.unwind()
    undo.unwind()
    assert done == [3, 2, 1]


@pytest.mark.parametrize("later", ["theirs", None])
def test_attributes_come_back_but_for_those_that_somebody_has_changed(later: str | None) -> None:
    restored, changed, undo = Thing(), Thing(), UndoStack()
    restored.colour = "before"
    for thing in (restored, changed):
        set_attribute(thing, "colour", "mine", undo)
    if later is None:
        del changed.colour
    else:
        changed.colour = later
    undo.unwind()
    assert restored.colour == "before"
    assert vars(changed) == ({} if later is None else {"colour": later})


# -- what is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "expected"), [(0, "once\neach\n"), (1, "each\n")])
def test_in_a_job_rank_0_speaks(
    rank: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "has_process_group", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    log.say("once")
    log.say("each", every_rank=True)
    assert capsys.readouterr().out == expected


# -- tensors ---------------------------------------------------------------------------------


def test_memory_is_found_while_somebody_has_it() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    find = find_again(whole[1:, ::2])
    found = find()
    assert found is not None
    assert found.tolist() == [[4.0, 6.0], [8.0, 10.0]]
    found.zero_()
    assert whole.sum() == 66 - 28
    del found
    rest = whole[0]
    del whole
    assert find() is not None
    del rest
    assert find() is None


# -- a file that is replaced as a whole, on file systems that cannot do everything ------------


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

    told = pytest.raises(OSError, match=os.strerror(code)) if fails else nullcontext()
    with told, replacing(path) as file:
        file.write(b"new")
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
