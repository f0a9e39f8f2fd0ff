# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory: what was there for a moment is seen, what was there before is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from preamp_bench import memory
from preamp_bench.memory import Peak

MEGABYTES = 64
CPU = torch.device("cpu")


def fill() -> None:
    torch.ones(MEGABYTES * 2**20, dtype=torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_a_tensor_that_is_gone_again_counts() -> None:
    fill()
    peak = Peak(CPU)
    before = peak.bytes()
    fill()
    after = peak.bytes()
    assert before is not None
    assert after is not None
    assert before < MEGABYTES * 2**20 / 2
    assert after > MEGABYTES * 2**20 * 0.9


def test_what_nobody_counts_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Peak(torch.device("meta")).bytes() is None
    monkeypatch.setattr(memory, "_RESET", tmp_path / "missing" / "clear_refs")
    assert Peak(CPU).bytes() is None
