# SPDX-License-Identifier: BSD-3-Clause
"""Whole training programs that know only the name apex end where their float32 run ends."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alias.harness import Zygote, run_python

HERE = Path(__file__).parent
SCRIPTS = ("imagenet", "bert")
CLOSE = 0.1
"""How far the last loss of a half run may be from the float32 run's, relative to it.

Rounding changes the path of training; skipping the first steps until the loss scale fits shifts
it by a step or two.
"""

Call = Callable[..., str]
RESULT = re.compile(r"^final loss (\S+) final metric (\S+)$", re.MULTILINE)
LEARNT = {"imagenet": 1.2, "bert": 1.0}
"""A loss below which a script has learnt something; it starts at log(classes)."""


@pytest.fixture(scope="module")
def script(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Run a script of this folder, once for the same arguments, and return what it printed."""
    done: dict[tuple[str, ...], str] = {}
    folder = tmp_path_factory.mktemp("scripts")

    def run(name: str, *arguments: str) -> str:
        key = (name, *arguments)
        if key not in done:
            process = zygote.preamp_run([str(HERE / f"{name}.py"), *arguments], folder)
            assert process.returncode == 0, process.stderr
            done[key] = process.stdout
        return done[key]

    return run


def costly(value: str) -> Any:
    """A value for the full suite only: another run of the same script costs seconds."""
    return pytest.param(value, marks=pytest.mark.full)


def result(printed: str) -> tuple[float, float]:
    match = RESULT.search(printed)
    assert match is not None, printed
    return float(match[1]), float(match[2])


def check_near(name: str, printed: str, in_float32: str) -> None:
    loss, expected = result(printed)[0], result(in_float32)[0]
    assert expected < LEARNT[name]
    assert abs(loss - expected) <= CLOSE * expected


# -- image classification --------------------------------------------------------------------

FLAGS = (
    ("--opt-level", "O2", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "False"),
    ("--opt-level", "O3", "--keep-batchnorm-fp32", "True"),
    ("--opt-level", "O1", "--loss-scale", "512"),
)


@pytest.mark.parametrize("level", [costly(level) for level in ("O1", "O2", "O3", "O5")])
def test_imagenet(script: Call, level: str) -> None:
    check_near("imagenet", script("imagenet", "--opt-level", level),
               script("imagenet", "--opt-level", "O0"))  # fmt: skip


@pytest.mark.parametrize("flags", [FLAGS[0], *map(costly, FLAGS[1:])], ids=" ".join)
def test_imagenet_flags(script: Call, flags: tuple[str, ...]) -> None:
    printed = script("imagenet", *flags)
    check_near("imagenet", printed, script("imagenet", "--opt-level", "O0"))
    if "--loss-scale" in flags:
        asked = flags[flags.index("--loss-scale") + 1]
        used = re.findall(r"^loss_scale +: (\S+)$", printed, re.MULTILINE)[-1]
        assert used == asked or float(used) == float(asked)


def test_imagenet_goes_on_where_it_stopped(script: Call, tmp_path: Path) -> None:
    """What is printed after resuming is digit for digit what the unbroken run prints."""
    whole = script("imagenet", "--opt-level", "O2")
    file = str(tmp_path / "checkpoint.pt")
    script("imagenet", "--opt-level", "O2", "--stop-after", "1", "--checkpoint", file)
    resumed = script("imagenet", "--opt-level", "O2", "--resume", file)
    assert "(epoch 1)" in resumed
    later = [line for line in whole.splitlines() if line.startswith(("epoch 1", "epoch 2", "fin"))]
    assert later == resumed.splitlines()[-3:]


@pytest.mark.full
def test_imagenet_with_synchronised_batch_norm(script: Call) -> None:
    printed = script("imagenet", "--opt-level", "O1", "--sync_bn")
    check_near("imagenet", printed, script("imagenet", "--opt-level", "O0"))


# -- fine-tuning -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["fused_adam", costly("adamw"), costly("fused_lamb")])
def test_bert(script: Call, optimizer: str) -> None:
    flags = ("--optimizer", optimizer)
    printed = script("bert", *flags, "--fp16", "--fp16_opt_level", "O2")
    check_near("bert", printed, script("bert", *flags))


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
def test_imagenet_in_two_processes(tmp_path: Path) -> None:
    """With Apex's; each rank sees its half of the pictures, so the steps are other ones."""
    printed = torchrun(tmp_path, str(HERE / "imagenet.py"), "--opt-level", "O1", "-b", "32")
    assert result(printed)[0] < LEARNT["imagenet"]


# -- the scripts themselves ------------------------------------------------------------------


def test_every_script_is_run() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == {*SCRIPTS, "test_scripts"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_do_not_know_preamp(name: str) -> None:
    text = (HERE / f"{name}.py").read_text("utf-8")
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert any(module.startswith("apex") for module in imported)
    assert "preamp" not in text


@pytest.mark.full
def test_a_script_through_the_front_door(tmp_path: Path) -> None:
    """The others are forked from one process; this one is started as a user starts it."""
    script = (str(HERE / "bert.py"), "--fp16", "--max_steps", "4")
    done = run_python(("-W", "error", "-m", "preamp", "run", *script), tmp_path)
    assert done.returncode == 0, done.stderr
    assert RESULT.search(done.stdout)
