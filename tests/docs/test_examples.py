# SPDX-License-Identifier: BSD-3-Clause
"""Every example runs as a user would run it, and shows that it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LEARNT = 0.7  # what is left of the first value, at most


def run(example: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("arguments", [(), ("--opt-level", "O5", "--steps", "250")], ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(example: Path, arguments: tuple[str, ...]) -> None:
    printed = run(example, *arguments)
    match = re.search(r"(\d+\.\d+) -> (\d+\.\d+) in \d+ steps at O\d", printed)
    assert match, printed
    first, last = map(float, match.groups())
    assert last < LEARNT * first
    if arguments:
        assert "in 250 steps at O5" in printed


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
