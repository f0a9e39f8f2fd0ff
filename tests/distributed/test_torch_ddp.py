# SPDX-License-Identifier: BSD-3-Clause
"""torch's DistributedDataParallel at every opt level."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import agreement_checks, torch_ddp_checks, wrapping_checks
from distributed.ranks import assert_pass, checks_of


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(torch_ddp_checks), torch_ddp_checks.RANKS, tmp_path)


def test_ranks_that_differ(tmp_path: Path) -> None:
    assert_pass(checks_of(agreement_checks), agreement_checks.RANKS, tmp_path)


def test_wrappers_made_and_used_at_other_times(tmp_path: Path) -> None:
    assert_pass(checks_of(wrapping_checks), wrapping_checks.RANKS, tmp_path)
