# SPDX-License-Identifier: BSD-3-Clause
"""``PREAMP_INSIGHT``: a file says what is recorded and watched, and the script stays as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.numerics import read_history

pytest.importorskip("tomllib", reason="Python 3.10 reads TOML with the package tomli")

FILE = """
history = "run.jsonl"
numerics = "light"
numerics_every = 2

[[activations]]
pattern = ["0", "2"]
kinds = ["output", "output gradient"]
steps = { start = 1, stop = 6, step = 2 }
"""


def made(level: str = "O2") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> None:
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).float().square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def insight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "insight.toml"
    path.write_text(FILE, "utf-8")
    monkeypatch.setenv("PREAMP_INSIGHT", str(path))
    return path


def test_what_the_file_asks_for_is_recorded_beside_it(
    insight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = made()
    told = capsys.readouterr().out
    train(model, optimizer)
    preamp.engine_of(model).close()
    records: list[Any] = read_history(insight.with_name("run.jsonl"))
    assert [one.step for one in records if one.kind == "step"] == [1, 2, 3, 4, 5, 6]
    tensors = {one.step: one.tensors for one in records if one.kind == "numerics"}
    gradients = [s for s, found in tensors.items() if any(t.what == "gradient" for t in found)]
    assert gradients == [1, 3, 5]
    watched = {
        (step, one.name, one.what)
        for step, found in tensors.items()
        for one in found
        if one.what in ("output", "output gradient")
    }
    assert watched == {
        (step, name, what)
        for step in (1, 3, 5)
        for name in ("0", "2")
        for what in ("output", "output gradient")
    }
    assert f"as {insight} says" in told  # whatever the verbosity, since a file asks
    assert "activations of ['0', '2']" in told


def test_numbers_stay_and_nothing_is_recorded_without_the_file(
    insight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, optimizer = made()
    train(watched, optimizer)
    preamp.engine_of(watched).close()
    monkeypatch.delenv("PREAMP_INSIGHT")
    plain, optimizer = made()
    train(plain, optimizer)
    engine = preamp.engine_of(plain)
    assert engine.history.path is None
    engine.close()
    for ours, wanted in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, wanted)


def test_each_engine_of_a_process_has_a_file(insight: Path) -> None:
    runs = [made(), made("O1")]
    for run in runs:
        train(*run, steps=1)
    paths = [preamp.engine_of(model).history.path for model, _ in runs]
    for model, _ in runs:
        preamp.engine_of(model).close()
    assert paths == [insight.with_name("run.jsonl"), insight.with_name("run-2.jsonl")]


def test_a_pattern_that_fits_no_module_is_told(
    insight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insight.write_text('numerics = "light"\n[[activations]]\npattern = "layers.*"\n', "utf-8")
    model, _ = made()
    assert "'layers.*'" in capsys.readouterr().out
    preamp.engine_of(model).close()


def test_frames_of_chosen_steps_are_recorded(
    insight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insight.write_text('history = "run.jsonl"\n[frames]\nsteps = [2, 4]\n', "utf-8")
    model, optimizer = made()
    assert "frames of '*'" in capsys.readouterr().out
    train(model, optimizer)
    preamp.engine_of(model).close()
    records: list[Any] = read_history(insight.with_name("run.jsonl"))
    found = {one.step: one.frames for one in records if one.kind == "frames"}
    assert sorted(found) == [2, 4]
    assert [(one.module, one.type) for one in found[2]] == [
        ("0", "Linear"),
        ("1", "Tanh"),
        ("2", "Linear"),
        ("", "Sequential"),
    ]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("numeric = 'light'", "'numeric'"),
        ("= 1", "no TOML"),
        ("activations = 3", "activations = 3"),
        ("activations = ['a']", "'a' in activations"),
        ("numerics = 'light'\n[[activations]]\nnames = 'a'", "'names'"),
        ("numerics = 'light'\n[[activations]]\nkinds = ['outputs']", "outputs"),
        ("numerics = 'light'\n[[activations]]\nsteps = {start = 1}", "steps"),
        ("numerics = 'light'\n[[activations]]\nsteps = {stop = 1.5}", "steps"),
        ("numerics = 'light'\n[[activations]]\nsteps = 3", "steps = 3"),
        ("[[activations]]\npattern = 'a'", "activations alone"),
        ("[frames]\nsteps = [1]", "frames alone"),
        ("numerics = 'light'\n[frames]\npattern = 'a'", "frames without steps"),
        ("numerics = 'light'\n[frames]\nsteps = 10", "steps = 10"),
        ("numerics = 'light'\n[frames]\nsteps = [1]\nkinds = 'input'", "'kinds'"),
        ("frames = 1", "1 in frames"),
        ("numerics = 'much'", "numerics='much'"),
    ],
)
def test_a_wrong_file_is_refused_and_changes_nothing(insight: Path, text: str, got: str) -> None:
    insight.write_text(text, "utf-8")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=re.escape(got)):
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype is torch.float32


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREAMP_INSIGHT", str(tmp_path / "nothing.toml"))
    with pytest.raises(FileNotFoundError):
        made()


def test_a_run_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "insight.toml").write_text('overflow = "trace"\n', "utf-8")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom apex import amp\nimport preamp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model = amp.initialize(model, opt_level='O2', verbosity=0)\n"
        "print(preamp.engine_of(model).policy.overflow)\n",
        "utf-8",
    )
    run = [sys.executable, "-m", "preamp", "run", "--insight"]
    done = subprocess.run(
        [*run, "insight.toml", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trace"
    done = subprocess.run(
        [*run, "none.toml", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "There is no file" in done.stderr
