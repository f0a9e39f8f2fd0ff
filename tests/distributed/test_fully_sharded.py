# SPDX-License-Identifier: BSD-3-Clause
"""Sharded models and optimizers on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import (
    fully_sharded_against_ddp,
    fully_sharded_checks,
    fully_sharded_programs,
    fully_sharded_records,
    mesh_checks,
    named_state_checks,
    sharded_optimizer_checks,
)
from distributed.ranks import assert_pass, checks_of

RUNS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event") and torch.__version__[:4] != "2.8."
"""Whether a model under ``fully_shard`` can.

In torch 2.6 none could, and 2.8 adds float32 and bfloat16 gradients up that it has to average.
"""

# One start serves all checks, so what this torch can do is checked before the rest is skipped.


def skip_the_rest() -> None:
    if not RUNS_ON_CPUS:
        pytest.skip("fully_shard of this torch needs GPUs")


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    modules = [sharded_optimizer_checks]
    if RUNS_ON_CPUS:
        modules += [fully_sharded_checks, fully_sharded_programs, named_state_checks]
    checks = [check for module in modules for check in checks_of(module)]
    assert_pass(checks, fully_sharded_checks.RANKS, tmp_path)
    skip_the_rest()


@pytest.mark.full
def test_records_and_training_beside_ddp_on_two_ranks(tmp_path: Path) -> None:
    skip_the_rest()
    checks = [*checks_of(fully_sharded_records), *checks_of(fully_sharded_against_ddp)]
    assert_pass(checks, fully_sharded_checks.RANKS, tmp_path)


@pytest.mark.full
def test_meshes_and_groups_on_four_ranks(tmp_path: Path) -> None:
    checks = checks_of(mesh_checks)
    if not RUNS_ON_CPUS:
        checks.remove(mesh_checks.check_replicated_groups_of_fully_shard)
        checks.remove(mesh_checks.check_one_of_four_differs)
    assert_pass(checks, mesh_checks.RANKS, tmp_path)
    skip_the_rest()
