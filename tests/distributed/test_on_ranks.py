# SPDX-License-Identifier: BSD-3-Clause
"""What several ranks check, the checks of a row in one start: `ranks.assert_pass` runs them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import (
    agreement_checks,
    ddp_checks,
    fully_sharded_checks,
    fully_sharded_programs,
    fully_sharded_records,
    mesh_checks,
    sharded_params_checks,
    storage_checks,
    sync_batchnorm_checks,
    training_checks,
    wrapping_checks,
)
from distributed.ranks import RUNS_ON_CPUS, assert_pass, checks_of

more, full = pytest.mark.more, pytest.mark.full
under_fully_shard = pytest.mark.skipif(
    not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs"
)
ROWS: dict[str, tuple[int, tuple[Any, ...], tuple[pytest.MarkDecorator, ...]]] = {
    # how many ranks, whose checks, and marks
    "ddp": (2, (ddp_checks,), ()),
    "training under ddp": (2, (training_checks,), (more,)),
    "ranks that differ": (2, (agreement_checks, wrapping_checks), ()),
    "storage": (2, (storage_checks,), (more,)),
    "sync batch norm": (2, (sync_batchnorm_checks,), (more,)),
    "optimizers over sharded parameters": (2, (sharded_params_checks,), ()),
    "fully_shard": (2, (fully_sharded_checks,), (more, under_fully_shard)),
    "programs under fully_shard": (2, (fully_sharded_programs,), (full, under_fully_shard)),
    "records under fully_shard": (2, (fully_sharded_records,), (full, under_fully_shard)),
    "meshes": (4, (mesh_checks,), (full,)),
}


@pytest.mark.parametrize(
    ("world", "modules"),
    [pytest.param(*row, id=name, marks=marks) for name, (*row, marks) in ROWS.items()],
)
def test_on_ranks(world: int, modules: Sequence[Any], tmp_path: Path) -> None:
    assert_pass([check for module in modules for check in checks_of(module)], world, tmp_path)


def test_on_four_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(sync_batchnorm_checks, "four_"), 4, tmp_path)


def check_fails_on_rank_1() -> None:
    dist.all_reduce(torch.zeros(1))  # a rank that is gone before the other has joined fails that
    assert dist.get_rank() == 0, "on purpose"
    dist.all_reduce(torch.zeros(1))


def test_a_failing_rank_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)check_fails_on_rank_1 on rank 1.*on purpose"):
        assert_pass([check_fails_on_rank_1], 2, tmp_path)
