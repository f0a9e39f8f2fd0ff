# SPDX-License-Identifier: BSD-3-Clause
"""A rank that dies or hangs: the others raise, with the reason, and what they have is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.dying_rank import run_rank
from distributed.survivors import reason_of_first

DEATHS = {"dies": ("dies", "closed by peer|reset by peer"), "hangs": ("hangs", "[Tt]imed out")}


@pytest.mark.parametrize(("how", "reason"), DEATHS.values())
def test_the_others_raise_in_time(tmp_path: Path, how: str, reason: str) -> None:
    assert re.search(reason, reason_of_first(run_rank, tmp_path, how))
