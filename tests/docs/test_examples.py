# SPDX-License-Identifier: BSD-3-Clause
"""Every example runs as a user would run it, and shows that it learns."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from cases.ranks import start_ranks
from distributed.test_fully_sharded import RUNS_ON_CPUS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LEARNT = 0.7  # what is left of the first value, at most


def skip_where_it_needs_gpus(example: Path) -> None:
    if example.stem == "06_fully_sharded" and not RUNS_ON_CPUS:
        pytest.skip("fully_shard of this torch needs GPUs")


def run(example: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Return what it prints in a new interpreter, to which warnings at imports are errors too."""
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


def run_in_a_fork(example: Path, *arguments: str, folder: Path) -> str:
    """Return what it prints, without the seconds that importing torch takes."""
    file = folder / "printed.txt"
    ranks = start_ranks(begin, (str(example), arguments, str(file)), 1)
    while not ranks.join():
        pass
    return file.read_text("utf-8")


def begin(_: int, example: str, arguments: tuple[str, ...], printed: str) -> None:
    torch.set_num_threads(1)
    sys.argv = [example, *arguments]
    with open(printed, "w", encoding="utf-8") as file, redirect_stdout(file):
        warnings.simplefilter("error")
        runpy.run_path(example, run_name="__main__")


@pytest.mark.full
@pytest.mark.parametrize("arguments", [(), ("--opt-level", "O5", "--steps", "250")], ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(example: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    skip_where_it_needs_gpus(example)
    if example == EXAMPLES[0]:
        printed = run(example, *arguments)
    else:
        printed = run_in_a_fork(example, *arguments, folder=tmp_path)
    match = re.search(r"(\d+\.\d+) -> (\d+\.\d+) in \d+ steps at O\d", printed)
    assert match, printed
    first, last = map(float, match.groups())
    assert last < LEARNT * first
    assert "False" not in printed  # what it says of its own run
    if arguments:
        assert "in 250 steps at O5" in printed


@pytest.mark.full
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_sharded_example_goes_on_bitwise_on_two_ranks(level: str) -> None:
    (example,) = [path for path in EXAMPLES if path.stem == "06_fully_sharded"]
    skip_where_it_needs_gpus(example)
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
