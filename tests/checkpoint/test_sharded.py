# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of which every rank writes a part, and loading them into other numbers of ranks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import preamp
from checkpoint import mesh_checks, sharded_checks, storage_checks
from distributed.ranks import assert_pass, checks_of
from distributed.test_fully_sharded import RUNS_ON_CPUS
from preamp.checkpoint import latest_checkpoint, read_checkpoint
from preamp.checkpoint.storage import tidy_folder

pytestmark = pytest.mark.skipif(
    not RUNS_ON_CPUS, reason="fully_shard runs on CPUs with newer versions of torch only"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What two ranks have left, after they passed their checks."""
    found = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREAMP_TEST_FOLDER", str(found))
        checks = checks_of(sharded_checks)
        checks.remove(sharded_checks.check_loading_from_two_ranks)
        checks.append(storage_checks.check_checkpoints_go_from_one_way_to_another)
        assert_pass([*checks, sharded_checks.save_for_others], 2, found)
        yield found


@pytest.mark.more
def test_into_one_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharded_checks.check_loading_from_two_ranks()
    assert "has the random states of 2 ranks" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 4])
def test_into_more_ranks(folder: Path, ranks: int, tmp_path: Path) -> None:
    checks = [sharded_checks.check_loading_from_two_ranks]
    assert_pass(checks + (checks_of(mesh_checks) if ranks == 4 else []), ranks, tmp_path)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A folder with one sharded checkpoint, ``step_1``."""
    shutil.copytree(folder / "saved" / "O2-fsdp", tmp_path / "step_1")
    return tmp_path


def test_damage_is_refused(copied: Path, folder: Path) -> None:
    path = copied / "step_1"
    good = shutil.copytree(path, copied / "good_1")
    file = path / "1-rank1-of2.pt"
    whole = file.read_bytes()

    def refused(reason: str) -> None:
        with pytest.raises(preamp.CheckpointError, match=re.escape(reason)) as got:
            preamp.load_checkpoint(path)
        assert f"Load {good}, the newest complete checkpoint" in str(got.value)
        assert latest_checkpoint(copied) == good

    for damaged in (whole[: len(whole) // 2], b"", whole[:-1]):
        file.write_bytes(damaged)
        refused(f"{path} is not loaded: in 1-rank1-of2.pt: ")
    for place in range(200, len(whole), len(whole) // 12):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_checkpoint(path)
        except preamp.CheckpointError:
            continue
        assert str(found["models"]) == str(read_checkpoint(good)["models"])  # in unused bytes
    file.write_bytes(whole)
    shutil.copy(folder / "saved" / "O1-fsdp" / "1-rank1-of2.pt", file)
    refused("1-rank1-of2.pt is a file of another checkpoint")
    shutil.copy(good / "1-rank0-of2.pt", file)
    refused("1-rank1-of2.pt is a file of another checkpoint")
    file.unlink()
    refused("it is incomplete: of 2 ranks' files those of 1 are missing")
    with pytest.raises(preamp.CheckpointError, match="one of the 2 files of a sharded checkpoint"):
        preamp.load_checkpoint(good / "1-rank0-of2.pt")
    (path / "1-rank0-of2.pt").unlink()
    refused("it is a folder without files of a checkpoint")


def test_drafts_of_a_later_save_are_left_alone(tmp_path: Path) -> None:
    """Another rank may just have made one, and not locked it yet."""
    names = ("1-rank0-of2.pt", "1-rank1-of2.pt", "2-rank0-of2.pt")
    drafts = (".1-rank1-of2.pt.a.part", ".2-rank1-of2.pt.b.part")
    for name in (*names, *drafts):
        (tmp_path / name).touch()
    assert tidy_folder(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted((*names, drafts[1]))
    (tmp_path / "2-rank1-of2.pt").touch()
    assert tidy_folder(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"2-rank0-of2.pt", "2-rank1-of2.pt"}


def test_a_file_in_the_way(copied: Path) -> None:
    with pytest.raises(OSError, match="step_1 cannot be written"):
        preamp.save_checkpoint(copied / "step_1", extra=1)
    assert latest_checkpoint(copied) == copied / "step_1"
