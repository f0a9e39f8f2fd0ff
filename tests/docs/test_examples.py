# SPDX-License-Identifier: BSD-3-Clause
"""Every example runs as a user would run it, and shows that it learns."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from argparse import Namespace
from concurrent.futures import Future
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from cases.ranks import start_ranks
from distributed.ranks import RUNS_ON_CPUS
from preamp.kernels import cpu_lacks_matmul

DEMO, *EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
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
    assert DEMO.stem == "00_demo"
    assert len(EXAMPLES) >= 3


BYTES = ("weights", "masters", "gradients", "optimizer state", "sum")
HELD = {
    "O0": (4, 0, 4, 8, 16),
    "autocast": (4, 0, 4, 8, 16),
    "O1": (4, 0, 4, 8, 16),
    "O2": (2, 4, 2, 8, 16),
    "O3": (2, 0, 2, 4, 8),
    "O4": (4, 0, 4, 8, 16),
    "O5": (2, 4, 2, 8, 16),
}
"""Bytes a parameter by the hand count of BYTES."""


@pytest.mark.full
def test_the_demo_tells_each_level_and_what_it_holds(tmp_path: Path) -> None:
    picture, file = tmp_path / "demo.svg", tmp_path / "demo.json"
    options = ("--small", "--steps", "12", "--levels", *HELD, "--device", "cpu")
    printed = run(DEMO, *options, "--picture", str(picture), "--json", str(file))
    lines, found = printed.splitlines(), json.loads(file.read_text("utf-8"))
    assert [line.partition(":")[0] for line in lines[:2]] == ["step 10 of 12", "step 12 of 12"]
    assert list(found) == list(HELD)
    for level, results in found.items():
        # AdamW has a counter of 4 bytes for each tensor, of which a small model has many.
        assert [results[name] for name in BYTES] == pytest.approx(HELD[level], abs=0.01)
        assert len(results["losses"]) == 12
        assert results["losses"][-1] < results["losses"][0]
        assert results["ms"] > 0
        if level != "O3" and not results["skipped"]:
            assert results["held_out"] == pytest.approx(found["O0"]["held_out"], rel=0.01)
        assert f"{level}: {results['held_out']:.3f} bits per held-out byte" in lines[2:]
    for level in ("O2", "O5", "autocast"):
        assert (found[level]["kept"] < found["O0"]["kept"]) or cpu_lacks_matmul(torch.float16)
    assert "<svg" in picture.read_text("utf-8")


def test_the_demo_stops_a_level_that_would_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = runpy.run_path(str(DEMO))
    taken: list[str] = []

    class Pool:
        """In place of a process: every step of autocast is slow."""

        def __init__(self, _count: int, _context: object, _begin: object, given: tuple) -> None:
            self.level, self.steps = given[0], 0

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, _: object, method: str, *arguments: int) -> Future:
            taken.append(f"{self.level} {method}")
            self.steps += method == "turn"
            ms = 60.0 if self.level == "autocast" else 10.0
            done: Future = Future()
            done.set_result({"ms": ms, "losses": [8.0] * 10 * self.steps, "held_out": 5.0})
            return done

    measure = demo["measure"]
    monkeypatch.setitem(measure.__globals__, "ProcessPoolExecutor", Pool)
    given = Namespace(levels=None, steps=20, device="cpu", small=True)
    measure(given)
    turns = ["O0 turn", "O5 turn", "O2 turn"]
    assert taken == ["O0 turn", "autocast turn", *turns[1:], *turns] + [
        f"{level} finish" for level in ("O0", "O5", "O2")
    ]
    assert "step 20 of 20: O0 8.000, O5 8.000, O2 8.000\n" in capsys.readouterr().out
    taken.clear()
    measure(Namespace(**{**vars(given), "levels": ["O0", "autocast"]}))
    assert taken == ["O0 turn", "autocast turn"] * 2 + ["O0 finish", "autocast finish"]
