# SPDX-License-Identifier: BSD-3-Clause
"""Masters and moments kept in fewer bits, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import moments_checks, storage_checks
from distributed.ranks import assert_pass, checks_of


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(storage_checks) + checks_of(moments_checks), 2, tmp_path)
