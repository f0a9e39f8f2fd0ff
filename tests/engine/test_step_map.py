# SPDX-License-Identifier: BSD-3-Clause
"""What a steady step costs in Python: the more parameters, the more only torch has to do."""

import pytest

from step_map import calls_per_parameter, make_step, trace

levels = pytest.mark.parametrize("level", ["O2", "O5"])


@levels
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD", "FusedLAMB"])
def test_a_parameter_costs_two_calls(level: str, optimizer: str, clips: bool) -> None:
    assert calls_per_parameter(level, optimizer, clips=clips) <= 2


@levels
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD", "FusedLAMB"])
def test_a_split_master_costs_no_more(level: str, optimizer: str) -> None:
    assert calls_per_parameter(level, optimizer, storage="split") <= 2


@levels
def test_a_parameter_of_torchs_optimizer_costs_eight(level: str) -> None:
    """It reads each gradient several times, and each read of a master's is a call."""
    assert calls_per_parameter(level, "AdamW") <= 8


@levels
def test_all_gradients_of_masters_are_made_in_one_op(level: str) -> None:
    entered, _ = trace(make_step(level, "AdamW", 50, clips=False))
    entries = entered.elements()  # before Python 3.11 without the class's name
    ops = [name.split(".")[-1] for path, name in entries if path == "kernels/by_device.py"]
    assert ops.count("widen_add") == 1


@levels
@pytest.mark.parametrize(
    ("optimizer", "files", "functions"),
    [("FusedAdam", 26, 183), ("AdamW", 21, 166), ("FusedSGD", 27, 193), ("FusedLAMB", 30, 213)],
)
def test_a_step_enters_few_files(level: str, optimizer: str, files: int, functions: int) -> None:
    """Who follows one step opens no more; what is off, such as recording, is in none of them.

    Comprehensions count as functions before Python 3.12.
    """
    entered, _ = trace(make_step(level, optimizer, 50, clips=True))
    paths = {path for path, _ in entered}
    assert len(entered) <= functions
    assert len(paths) <= files
    assert not any(path.startswith("watch/") for path in paths)
