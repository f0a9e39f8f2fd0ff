# SPDX-License-Identifier: BSD-3-Clause
"""``preamp.GradScaler`` on two ranks: the same steps, scales and clips on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases.grad_scaler_on_ranks import under_ddp, under_fully_shard
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from distributed.test_fully_sharded import RUNS_ON_CPUS

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]


def test_under_ddp_it_does_what_torchs_does(tmp_path: Path) -> None:
    """With accumulation under ``no_sync``, changed gradients, and an overflow of one rank."""
    first, second = run_ranks(under_ddp, tmp_path)
    for name, found in first.items():
        _compare(second[name], found, name)
        _compare(found, first[f"torch {name.rpartition(' ')[2]}"], name)


@pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs")
def test_under_fully_shard_all_parts_get_one_factor(tmp_path: Path) -> None:
    """Every rank has other values to tell a clip from; all take the same."""
    first, second = run_ranks(under_fully_shard, tmp_path)
    for name, found in first.items():
        assert found[-2:] == [2.0, 1], name
        _compare(second[name], found, name)
        wanted = first["O0 " + name.partition(" ")[2]]
        for mine, exact in zip(found[:-2], wanted[:-2], strict=True):
            # Weights are rounded for the forward; the updates add up to 2**-5, clipped, or to 1.
            atol = 2.0**-11 if "clip" in name else 2.0**-7
            torch.testing.assert_close(mine, exact, rtol=0, atol=atol)


def _compare(some: list[Any], others: list[Any], name: str) -> None:
    for mine, its in zip(some, others, strict=True):
        assert_same(mine, its, name)
