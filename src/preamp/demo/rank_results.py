# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks say of a training, collected on all of them."""

from __future__ import annotations

from dataclasses import replace

from preamp.demo.model import GPT
from preamp.demo.parallel import RankResult, digest
from preamp.demo.records import LevelResult
from preamp.distributed.job import gather_to_all, own_rank


def with_ranks(row: LevelResult, model: GPT) -> LevelResult:
    """Add what each rank says, where there are several. All of them call this."""
    own = RankResult(
        rank=own_rank(),
        steps_skipped=row.steps_skipped,
        loss_scale=row.loss_scale,
        losses=digest(row.losses),
        weights=digest(model),
        median_seconds=row.median_seconds,
        bytes_per_parameter=row.memory and row.memory.total,
        peak_bytes=row.peak_bytes,
    )
    found = gather_to_all(own)
    return replace(row, ranks=tuple(found)) if len(found) > 1 else row
