# SPDX-License-Identifier: BSD-3-Clause
"""Attacks and the soak find nothing in a short form, and notice what they are there to notice."""

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attack_threads
import preamp
from alias.harness import run_python
from attack_files import attack
from attack_targets import SECONDS, Broken, Guard, Target
from cases.selection import examples
from preamp_bench import records

ROOT = Path(__file__).parents[2]
CASES = {"damaged": 150, "crafted": 60, "histories": 120, "odd": 1}
pytestmark = pytest.mark.filterwarnings("ignore")  # hostile files may cause some


def lines_of(kind: str, cases: int, folder: Path) -> list[str]:
    own = folder / kind
    own.mkdir()
    return list(attack(kind, cases, 1, own))


@pytest.mark.more
@pytest.mark.parametrize("kind", CASES)
def test_hostile_files_are_refused_or_load(kind: str, tmp_path: Path) -> None:
    lines = lines_of(kind, examples(CASES[kind]), tmp_path)
    assert [line for line in lines if line.startswith(("broken", "kept"))] == []
    wanted = {"end refused"} if kind == "damaged" else {"end refused", "end loaded"}
    assert wanted <= set(lines)


def raises(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


WORDED = "There is one. Nothing is allowed. Do something else."
BREAKS: dict[str, tuple[Callable[[], object], str]] = {
    "raw": (raises(KeyError("x")), "raw error KeyError"),
    "short": (raises(ValueError("no")), "not in three parts"),
    "long": (raises(ValueError(WORDED + "x" * 20_000 + ".")), "a message of 200"),
    "path": (raises(OSError(5, WORDED)), "names no path"),
    "slow": (lambda: time.sleep(60), "longer than"),
    "large": (lambda: torch.ones(1 << 25).sum(), "MiB of memory"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_readers_do_wrong_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attack_targets.SECONDS", 2 if name == "slow" else SECONDS)
    act, complaint = BREAKS[name]
    with pytest.raises(Broken, match=complaint):
        Guard().attempt(act, tmp_path / "file")


def test_what_is_changed_is_noticed(tmp_path: Path) -> None:
    guard = Guard()
    assert guard.attempt(raises(ValueError(WORDED)), tmp_path) == "refused"
    target = guard.target = Target("O2", 0)

    def change() -> None:
        with torch.no_grad():
            next(iter(preamp.master_params(target.optimizer))).add_(1)
        raise ValueError(WORDED)

    with pytest.raises(Broken, match="has changed something"):
        guard.attempt(change, tmp_path)
    target.close()


# -- threads ----------------------------------------------------------------------------------


@pytest.mark.more
def test_threads_get_what_they_get_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, rounds, out = sys.getswitchinterval(), examples(24), tmp_path / "rows.jsonl"
    try:
        status = attack_threads.main(["--rounds", str(rounds), "--seed", "1", "--out", str(out)])
    finally:
        sys.setswitchinterval(before)
    assert status == 0, capsys.readouterr().out
    (row,) = records.read(out)
    assert row["kinds"]["threads"]["rounds"] == rounds


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.main_thread()

    def train(program: attack_threads.Program) -> list[torch.Tensor]:
        return [torch.tensor(float(threading.current_thread() is here))]

    monkeypatch.setattr(attack_threads, "train", train)
    count, broken = attack_threads.attack(random.Random(1))
    assert len(broken) == count
    assert all("differs from what it does alone" in line for line in broken)


# -- the soak --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_short_soak_passes(tmp_path: Path) -> None:
    options = ("--steps", "40", "--seed", "37", "--levels", "O2", "--results")
    done = run_python(("tools/soak.py", *options, str(tmp_path / "rows")), ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = records.read(tmp_path / "rows")
    assert (row["level"], row["steps"]) == ("O2", 40)
    assert row["applied"] + row["skipped"] == 2 * 40
    assert min(row[what] for what in ("skipped", "saves", "reloads", "kills")) > 0
    assert row["memory"].keys() == {"straight", "reloaded"}
    assert f"O2, seed 37: 40 steps, {row['applied']} applied" in done.stdout
    assert "all ends are equal" in done.stdout
