# SPDX-License-Identifier: BSD-3-Clause
"""Data-parallel training at every opt level."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import training_checks
from distributed.ranks import assert_pass, checks_of


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(training_checks), training_checks.RANKS, tmp_path)
