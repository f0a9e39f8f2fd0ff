# SPDX-License-Identifier: BSD-3-Clause
"""Masters kept in fewer bits, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import storage_checks
from distributed.ranks import assert_pass, checks_of


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(storage_checks), 2, tmp_path)
