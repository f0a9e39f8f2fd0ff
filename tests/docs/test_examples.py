# SPDX-License-Identifier: BSD-3-Clause
"""Every example, and what pages show on several ranks, runs as a user would run it, and learns."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from alias.harness import run_python
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from code_blocks import blocks_of
from distributed.ranks import RUNS_ON_CPUS, needs_fully_shard
from preamp.kernels import cpu_lacks_matmul

DEMO, *EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LEARNT = 0.7  # what is left of the first value, at most


def run(example: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Return what it prints in a new interpreter, to which warnings at imports are errors too."""
    done = run_python(("-W", "error", *launcher, str(example), *arguments), Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        *((example, ()) for example in EXAMPLES),
        *((example, ("--opt-level", "O5", "--steps", "250")) for example in EXAMPLES[:2]),
    ],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_example_learns(example: Path, arguments: tuple[str, ...]) -> None:
    if example.stem == "06_fully_sharded" and not RUNS_ON_CPUS:
        pytest.skip("fully_shard of this torch needs GPUs")
    printed = run(example, *arguments)
    match = re.search(r"(\d+\.\d+) -> (\d+\.\d+) in \d+ steps at O\d", printed)
    assert match, printed
    first, last = map(float, match.groups())
    assert last < LEARNT * first
    assert "False" not in printed  # what it says of its own run
    if arguments:
        assert "in 250 steps at O5" in printed


@pytest.mark.full
@needs_fully_shard
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
    done = run_python(("-c", code, str(example)), Path.cwd())
    assert done.returncode == 1
    assert done.stderr == "The digits are scikit-learn's: pip install scikit-learn\n"


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


# -- the example of reinforcement learning, on two ranks -------------------------------------------


FP16_RL = Path(__file__).parents[2] / "examples" / "07_fp16_rl.py"


def train_on(_: int, *, folder: str, stops: tuple[int, ...]) -> dict[str, float]:
    """Train up to each of ``stops``."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(FP16_RL.read_text("utf-8"), str(FP16_RL), "exec"), names)
    return [names["train"](folder, stop) for stop in stops][-1]


def trained(tmp_path: Path, name: str, *stops: int) -> list[Any]:
    meeting = tmp_path / f"meet-{name}"
    meeting.mkdir()
    return run_ranks(partial(train_on, folder=str(tmp_path / name), stops=stops), meeting)


@pytest.mark.full
@needs_fully_shard
def test_it_learns_and_resumes_bitwise(tmp_path: Path) -> None:
    straight = trained(tmp_path, "straight", 60)
    assert straight == trained(tmp_path, "resumed", 20, 60)
    assert all(rank["reward"] > 0.5 for rank in straight)
    assert straight[0]["applied"] + straight[0]["skipped"] == 60


# -- the blocks of around-training.md that need several ranks --------------------------------------


AROUND = Path(__file__).parents[2] / "docs" / "around-training.md"


def broadcast(rank: int) -> list[list[torch.Tensor]]:
    """Run them from other weights on each rank, with a step on the same data after each."""
    first, *others = blocks_of(AROUND.read_text(encoding="utf-8"))
    others = [other for other in others if "torch.distributed" in other.code]
    assert all(block.reason for block in others)
    names: dict[str, Any] = {}
    exec(first.code, names)
    found: list[list[torch.Tensor]] = []
    for number, block in enumerate(others):
        torch.manual_seed(rank)
        if number:  # nothing reduces gradients here
            names["train_step"](names["model"], names["optimizer"])
            names["optimizer"].state.clear()
        start, step, rest = block.code.partition("train_step(model, optimizer)\n")
        exec(start, names)
        if step:
            torch.manual_seed(0)
            names["train_step"](names["model"], names["optimizer"])
            found.append(weights(names))
            torch.manual_seed(rank)
            names["train_step"](names["model"], names["optimizer"])
            names["optimizer"].state.clear()
            exec(rest, names)
        torch.manual_seed(0)
        names["train_step"](names["model"], names["optimizer"])
        found.append(weights(names))
    return found


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    halves = [param.detach().clone() for param in names["model"].parameters()]
    return halves + [p.detach().clone() for p in preamp.master_params(names["optimizer"])]


def test_ranks_that_broadcast_and_average_as_on_the_page_train_one_model(tmp_path: Path) -> None:
    first, second = run_ranks(broadcast, tmp_path)
    assert len(first) == 3
    assert not torch.equal(first[0][0], first[1][0])
    for number, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert len(mine) == 8
        for one, other in zip(mine, theirs, strict=True):
            if number == 1:  # averages of half weights, below whose digits masters differ
                torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-8)
            else:
                assert_same(one, other)
