# SPDX-License-Identifier: BSD-3-Clause
"""Every example runs as a user would run it, and shows that it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.test_fully_sharded import RUNS_ON_CPUS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LEARNT = 0.7  # what is left of the first value, at most


def run(example: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    if example.stem == "06_fully_sharded" and not RUNS_ON_CPUS:
        pytest.skip("fully_shard of this torch needs GPUs")
    done = subprocess.run(
        [sys.executable, "-W", "error", *launcher, str(example), *arguments],
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


@pytest.mark.full
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_sharded_example_goes_on_bitwise_on_two_ranks(level: str) -> None:
    (example,) = [path for path in EXAMPLES if path.stem == "06_fully_sharded"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(example, "--steps", "12", "--opt-level", level, launcher=launcher)
    assert "started anew after 6 steps, went on bitwise as without: True" in printed


@pytest.mark.full
def test_an_example_says_which_package_it_needs() -> None:
    (example,) = [path for path in EXAMPLES if path.stem == "03_gan"]
    code = "import runpy, sys; sys.modules['sklearn'] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(example)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "The digits are scikit-learn's: pip install scikit-learn\n"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
