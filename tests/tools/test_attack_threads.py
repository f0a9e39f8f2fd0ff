# SPDX-License-Identifier: BSD-3-Clause
"""Threads that train at once do not disturb each other, and the attack notices where they do."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest
import torch

import attack_threads
from cases.selection import examples
from preamp_bench import records

pytestmark = pytest.mark.filterwarnings("ignore")


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
