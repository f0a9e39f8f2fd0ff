# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from distributed import shard_checks
from distributed.ranks import assert_pass, checks_of
from preamp import PreampStateError
from preamp.distributed.shard_optimizer import span_of
from preamp.parallel import shard_optimizer


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(shard_checks), 2, tmp_path)


@pytest.mark.full
def test_on_three_ranks_some_without_a_part(tmp_path: Path) -> None:
    checks = [shard_checks.check_bytes_are_as_estimated, shard_checks.three_ranks]
    assert_pass(checks, 3, tmp_path)


@pytest.mark.parametrize("elements", [1, 2, 63, 64, 65, 128, 129, 1000, 1001])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_spans_cover_everything_once(elements: int, world_size: int) -> None:
    spans = [span_of(elements, rank, world_size) for rank in range(world_size)]
    covered = [place for start, stop in spans for place in range(start, stop)]
    assert covered == list(range(elements))
    assert max(stop - start for start, stop in spans) <= -(-elements // world_size) + 63
    assert all(start % 64 == 0 or start == elements for start, _ in spans)


def test_without_a_process_group() -> None:
    text = "shard_optimizer was used without a process group."
    with pytest.raises(PreampStateError, match=re.escape(text)):
        shard_optimizer(torch.optim.SGD([torch.zeros(1)]))
