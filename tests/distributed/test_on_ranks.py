# SPDX-License-Identifier: BSD-3-Clause
"""What several ranks check, the checks of a row in one start: `ranks.assert_pass` runs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import (
    ddp_checks,
    fully_sharded_checks,
    sharded_params_checks,
    storage_checks,
    sync_batchnorm_checks,
    training_checks,
)
from distributed.ranks import assert_pass, checks_of, needs_fully_shard

more, full = pytest.mark.more, pytest.mark.full
ROWS: dict[str, tuple[int, Any, str, tuple[pytest.MarkDecorator, ...]]] = {
    # how many ranks, whose checks, how their names begin, and marks
    "ddp": (2, ddp_checks, "check_", ()),
    "training under ddp": (2, training_checks, "check_", (more,)),
    "storage": (2, storage_checks, "check_", (more,)),
    "sync batch norm": (2, sync_batchnorm_checks, "check_", (more,)),
    "groups of sync batch norm": (4, sync_batchnorm_checks, "four_", ()),
    "optimizers over sharded parameters": (2, sharded_params_checks, "check_", ()),
    "meshes": (4, sharded_params_checks, "four_", (full,)),
    "fully_shard": (2, fully_sharded_checks, "check_", (more, needs_fully_shard)),
    "programs under fully_shard": (2, fully_sharded_checks, "full_", (full, needs_fully_shard)),
    "records under fully_shard": (2, fully_sharded_checks, "records_", (full, needs_fully_shard)),
}


@pytest.mark.parametrize(
    ("world", "module", "prefix"),
    [pytest.param(*row, id=name, marks=marks) for name, (*row, marks) in ROWS.items()],
)
def test_on_ranks(world: int, module: Any, prefix: str, tmp_path: Path) -> None:
    assert_pass(checks_of(module, prefix), world, tmp_path)


def check_fails_on_rank_1() -> None:
    dist.all_reduce(torch.zeros(1))  # a rank that is gone before the other has joined fails that
    assert dist.get_rank() == 0, "on purpose"
    dist.all_reduce(torch.zeros(1))


def test_a_failing_rank_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)check_fails_on_rank_1 on rank 1.*on purpose"):
        assert_pass([check_fails_on_rank_1], 2, tmp_path)
