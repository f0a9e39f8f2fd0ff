# SPDX-License-Identifier: BSD-3-Clause
"""A whole training program that knows only the name apex ends where its float32 run ends."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alias.harness import Zygote, run_python

SCRIPT = Path(__file__).with_name("imagenet.py")
CLOSE = 0.1
"""How far the last loss of a half run may be from the float32 run's, relative to it.

Rounding changes the path of training; skipping the first steps until the loss scale fits shifts
it by a step or two.
"""

Call = Callable[..., str]
RESULT = re.compile(r"^final loss (\S+) final metric (\S+)$", re.MULTILINE)
LEARNT = 1.2
"""A loss below which it has learnt something; it starts at log(classes)."""


@pytest.fixture(scope="module")
def script(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Run the script, once for the same arguments, and return what it printed."""
    done: dict[tuple[str, ...], str] = {}
    folder = tmp_path_factory.mktemp("scripts")

    def run(*arguments: str) -> str:
        if arguments not in done:
            process = zygote.preamp_run([str(SCRIPT), *arguments], folder)
            assert process.returncode == 0, process.stderr
            done[arguments] = process.stdout
        return done[arguments]

    return run


def costly(value: str) -> Any:
    """A value for the full suite only: another run of the same script costs seconds."""
    return pytest.param(value, marks=pytest.mark.full)


def result(printed: str) -> tuple[float, float]:
    match = RESULT.search(printed)
    assert match is not None, printed
    return float(match[1]), float(match[2])


def check_near(script: Call, *flags: str) -> str:
    """What it prints with these flags, which make it end near its float32 run."""
    printed, in_float32 = script(*flags), script("--opt-level", "O0")
    loss, expected = result(printed)[0], result(in_float32)[0]
    assert expected < LEARNT
    assert abs(loss - expected) <= CLOSE * expected
    return printed


FLAGS = (
    ("--opt-level", "O2", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "False"),
    ("--opt-level", "O3", "--keep-batchnorm-fp32", "True"),
    ("--opt-level", "O1", "--loss-scale", "512"),
)


@pytest.mark.parametrize("level", [costly(level) for level in ("O1", "O2", "O3", "O5")])
def test_levels(script: Call, level: str) -> None:
    check_near(script, "--opt-level", level)


@pytest.mark.parametrize("flags", [FLAGS[0], *map(costly, FLAGS[1:])], ids=" ".join)
def test_flags(script: Call, flags: tuple[str, ...]) -> None:
    printed = check_near(script, *flags)
    if "--loss-scale" in flags:
        asked = flags[flags.index("--loss-scale") + 1]
        used = re.findall(r"^loss_scale +: (\S+)$", printed, re.MULTILINE)[-1]
        assert used == asked or float(used) == float(asked)


def test_it_goes_on_where_it_stopped(script: Call, tmp_path: Path) -> None:
    """What is printed after resuming is digit for digit what the unbroken run prints."""
    whole = script("--opt-level", "O2")
    file = str(tmp_path / "checkpoint.pt")
    script("--opt-level", "O2", "--stop-after", "1", "--checkpoint", file)
    resumed = script("--opt-level", "O2", "--resume", file)
    assert "(epoch 1)" in resumed
    later = [line for line in whole.splitlines() if line.startswith(("epoch 1", "epoch 2", "fin"))]
    assert later == resumed.splitlines()[-3:]


@pytest.mark.full
def test_synchronised_batch_norm(script: Call) -> None:
    check_near(script, "--opt-level", "O1", "--sync_bn")


# -- several processes -----------------------------------------------------------------------


def torchrun(folder: Path, *program: str) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python((*launcher, "-m", "preamp", "run", *program), folder)
    if done.returncode and "terminate called without an active exception" in done.stderr:
        # torch's own threads now and then abort a process that has ended; gloo, busy machines.
        assert "final loss" in done.stdout
        done = run_python((*launcher, "-m", "preamp", "run", *program), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_two_processes(tmp_path: Path) -> None:
    """With Apex's; each rank sees its half of the pictures, so the steps are other ones."""
    printed = torchrun(tmp_path, str(SCRIPT), "--opt-level", "O1", "-b", "32")
    assert result(printed)[0] < LEARNT


# -- the script itself -----------------------------------------------------------------------


def test_the_script_does_not_know_preamp() -> None:
    text = SCRIPT.read_text("utf-8")
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert any(module.startswith("apex") for module in imported)
    assert "preamp" not in text


@pytest.mark.full
def test_the_script_through_the_front_door(tmp_path: Path) -> None:
    """The others are forked from one process; this one is started as a user starts it."""
    script = (str(SCRIPT), "--opt-level", "O1", "--epochs", "1")
    done = run_python(("-W", "error", "-m", "preamp", "run", *script), tmp_path)
    assert done.returncode == 0, done.stderr
    assert RESULT.search(done.stdout)
