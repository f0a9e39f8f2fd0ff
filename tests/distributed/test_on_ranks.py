# SPDX-License-Identifier: BSD-3-Clause
"""What several ranks check, the checks of a row in one start: `ranks.assert_pass` runs them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import (
    agreement_checks,
    ddp_checks,
    delayed_checks,
    fully_sharded_against_ddp,
    fully_sharded_checks,
    fully_sharded_programs,
    fully_sharded_records,
    group_checks,
    mesh_checks,
    moments_checks,
    named_state_checks,
    overflow_checks,
    sharded_params_checks,
    storage_checks,
    sync_batchnorm_checks,
    torch_ddp_checks,
    training_checks,
    wrapping_checks,
)
from distributed.ranks import RUNS_ON_CPUS, Check, assert_pass, checks_of


def row(world: int, *checks: Check, id: str, marks: Sequence[pytest.MarkDecorator] = ()) -> object:
    return pytest.param(world, checks, id=id, marks=marks)


more, full = [pytest.mark.more], [pytest.mark.full]
under_fully_shard = pytest.mark.skipif(
    not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs"
)

ROWS = [
    row(2, *checks_of(ddp_checks), *checks_of(delayed_checks), id="ddp"),
    row(
        2,
        *checks_of(torch_ddp_checks),
        *checks_of(training_checks),
        id="training under ddp",
        marks=more,
    ),
    row(
        2,
        *checks_of(agreement_checks),
        *checks_of(wrapping_checks),
        *checks_of(overflow_checks),
        id="ranks that differ",
    ),
    row(2, *checks_of(storage_checks), *checks_of(moments_checks), id="storage", marks=more),
    row(2, *checks_of(sync_batchnorm_checks), id="sync batch norm", marks=more),
    row(4, *checks_of(group_checks), id="groups"),
    row(2, *checks_of(sharded_params_checks), id="optimizers over sharded parameters"),
    row(
        2,
        *checks_of(fully_sharded_checks),
        *checks_of(fully_sharded_programs),
        *checks_of(named_state_checks),
        id="fully_shard",
        marks=[*more, under_fully_shard],
    ),
    row(
        2,
        *checks_of(fully_sharded_records),
        *checks_of(fully_sharded_against_ddp),
        id="fully_shard's records, and beside ddp",
        marks=[*full, under_fully_shard],
    ),
    row(4, *checks_of(mesh_checks), id="meshes", marks=full),
]


@pytest.mark.parametrize(("world", "checks"), ROWS)
def test_on_ranks(world: int, checks: Sequence[Check], tmp_path: Path) -> None:
    assert_pass(checks, world, tmp_path)


def check_fails_on_rank_1() -> None:
    dist.all_reduce(torch.zeros(1))  # a rank that is gone before the other has joined fails that
    assert dist.get_rank() == 0, "on purpose"
    dist.all_reduce(torch.zeros(1))


def test_a_failing_rank_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)check_fails_on_rank_1 on rank 1.*on purpose"):
        assert_pass([check_fails_on_rank_1], 2, tmp_path)
