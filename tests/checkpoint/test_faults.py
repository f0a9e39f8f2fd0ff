# SPDX-License-Identifier: BSD-3-Clause
"""A rank that dies or hangs while it saves: the others raise, and the newest checkpoint is good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import preamp
from checkpoint.dying_saver import run_rank
from distributed.survivors import reason_of_first
from distributed.test_faults import DEATHS
from preamp.checkpoint import latest_checkpoint, read_checkpoint


@pytest.mark.parametrize(
    ("how", "reason"),
    # That of a rank that hangs waits for the timeout, and tests/distributed has one such.
    [DEATHS["dies"], pytest.param(*DEATHS["hangs"], marks=pytest.mark.full)],
)
def test_the_others_raise_in_time(tmp_path: Path, how: str, reason: str) -> None:
    text = reason_of_first(run_rank, tmp_path, how)
    assert re.search(reason, text)
    assert "Another rank did not answer while a checkpoint was saved or loaded" in text
    runs = tmp_path / "runs"
    assert latest_checkpoint(runs) == runs / "step_1"
    with pytest.raises(preamp.CheckpointError, match=f"Load {re.escape(str(runs / 'step_1'))}"):
        read_checkpoint(runs / "step_2")
    preamp.save_checkpoint(runs / "step_3", extra=1, keep_last=2)
    assert sorted(path.name for path in runs.iterdir()) == ["step_1", "step_3"]
