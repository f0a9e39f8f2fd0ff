# SPDX-License-Identifier: BSD-3-Clause
"""Accumulation under DistributedDataParallel: every rank sees the mean over all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases.accumulate_on_ranks import STEPS, accumulate, inputs, overflow_alone
from cases.ranks import run_ranks
from cases.tolerances import assert_same

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch has no distributed"
)


def test_every_rank_has_the_mean_of_all_micro_batches(tmp_path: Path) -> None:
    """With ``no_sync``, with buckets that gradients lie in, and with both, exactly."""
    ranks = run_ranks(accumulate, tmp_path)
    wanted = [
        sum(inputs(rank, step, part).sum(0, keepdim=True) for rank in range(2) for part in range(2))
        / 64
        / 2
        for step in range(STEPS)
    ]
    for rank, cases in enumerate(ranks):
        for name, found in cases.items():
            for step, grad in enumerate(found):
                assert_same(grad, wanted[step], f"rank {rank}, {name}, step {step}")


def test_an_overflow_of_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    """It shows in the reduced gradient; until then the scale of that rank does not move."""
    first, second = run_ranks(overflow_alone, tmp_path)
    assert first == second
    assert all(values[:2] == [2.0**15, 1.0] for values in first.values())
