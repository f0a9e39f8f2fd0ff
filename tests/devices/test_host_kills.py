# SPDX-License-Identifier: BSD-3-Clause
"""A process that dies while it saves a run whose masters lie on the host.

It is killed at each point at which a file's bytes or name go to the disk. What is there afterwards
is the checkpoint from before the save or that of the save, and loads at either place.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from devices.host_runs import Run, ids
from kit.compare import same

# CUDA does not survive a fork.
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended",
    reason="no pretended device here",
)
POINTS = ("fsync", "replace")


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def dying_at(number: int) -> None:
    """Let this process die at the call of that number of any of `POINTS`."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    for name in POINTS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kept", [("O2", "split"), ("O5", "compact")], ids=ids)
def test_what_a_killed_save_leaves_loads(
    kept: tuple[str, str], background: bool, tmp_path: Path
) -> None:
    run, path = Run("host", kept), tmp_path / "run.safetensors"
    run.play("iterate 0 1")
    preamp.save_checkpoint(path, run.model, run.optimizer)
    wanted: Any = [run.everything()]
    run.play("iterate 2")
    wanted.append(run.everything())

    def save() -> None:
        preamp.save_checkpoint(path, run.model, run.optimizer, asynchronous=background).wait()

    def die(number: int) -> None:
        dying_at(number)
        save()

    found: list[int] = []
    for number in range(1, 50):
        if in_child(lambda number=number: die(number)) == 0:
            break
        place = ("device", "host")[number % 2]
        other = Run(place, kept)
        preamp.load_checkpoint(path, other.model, other.optimizer, rng=False)
        matches = [same(one, other.everything()) for one in wanted]
        assert matches in ([True, False], [False, True]), f"killed at call {number}"
        found.append(matches.index(True))
    assert len(found) >= 2
    assert found[0] == 0
    assert found == sorted(found)  # once the new one is there, it stays
