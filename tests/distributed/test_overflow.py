# SPDX-License-Identifier: BSD-3-Clause
"""An overflow on one of two ranks."""

from __future__ import annotations

from pathlib import Path

from distributed import overflow_checks
from distributed.ranks import assert_pass, checks_of


def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(overflow_checks), overflow_checks.RANKS, tmp_path)
