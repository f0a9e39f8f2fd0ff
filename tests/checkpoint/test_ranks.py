# SPDX-License-Identifier: BSD-3-Clause
"""Files of one of several ranks; what they share is in ``test_run_state.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import rank_checks
from distributed.ranks import assert_pass, checks_of


def test_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREAMP_TEST_FOLDER", str(tmp_path))
    assert_pass(checks_of(rank_checks), 2, tmp_path)
