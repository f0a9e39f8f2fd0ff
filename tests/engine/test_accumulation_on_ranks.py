# SPDX-License-Identifier: BSD-3-Clause
"""Accumulation under DistributedDataParallel: every rank sees the mean over all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases.accumulate_on_ranks import STEPS, accumulate, inputs
from cases.ranks import run_ranks
from cases.tolerances import assert_same


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed")
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
