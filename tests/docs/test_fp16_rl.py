# SPDX-License-Identifier: BSD-3-Clause
"""The example learns on two ranks, waits for skipped steps, and resumes bit by bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.ranks import run_ranks
from distributed.ranks import RUNS_ON_CPUS

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_fp16_rl.py"

pytestmark = pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs")


def script() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(EXAMPLE.read_text("utf-8"), str(EXAMPLE), "exec"), names)
    return names


def work(rank: int, *, folder: str, stops: tuple[int, ...], breaks: int) -> dict[str, float]:
    """Train up to each of ``stops``; the last rank's first ``breaks`` rewards are too large."""
    names = script()
    reward_of = names["reward_of"]
    left = breaks if rank == 1 else 0

    def rewards(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= 1
        return reward_of(states, actions) * (1e6 if left >= 0 else 1.0)

    names["reward_of"] = rewards
    result: dict[str, float] = {}
    for stop in stops:
        result = names["train"](folder, stop)
    return result


def trained(tmp_path: Path, name: str, stops: tuple[int, ...], breaks: int = 0) -> list[Any]:
    meeting = tmp_path / f"meet-{name}"
    meeting.mkdir()
    folder = str(tmp_path / name)
    return run_ranks(partial(work, folder=folder, stops=stops, breaks=breaks), meeting)


@pytest.mark.full
def test_it_learns_and_resumes_bitwise(tmp_path: Path) -> None:
    straight = trained(tmp_path, "straight", (60,))
    assert straight == trained(tmp_path, "resumed", (20, 60))
    assert all(rank["reward"] > 0.5 for rank in straight)
    assert straight[0]["applied"] + straight[0]["skipped"] == 60


@pytest.mark.full
def test_all_ranks_skip_what_one_overflows_and_the_schedule_waits(tmp_path: Path) -> None:
    first, second = trained(tmp_path, "overflow", (20,), breaks=1)
    assert first["skipped"] > 0
    for name in ("applied", "skipped", "scale", "scheduled"):
        assert first[name] == second[name]
    assert first["scheduled"] == first["applied"] == 20 - first["skipped"]
