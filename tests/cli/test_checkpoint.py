# SPDX-License-Identifier: BSD-3-Clause
"""``preamp checkpoint show``: what is in a file, and why it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import preamp
from preamp.cli.app import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", "show", *map(str, arguments)])


def save(path: Path) -> Path:
    """A file after one step that was taken and one that was skipped."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    preamp.initialize(model, optimizer, opt_level="O2", max_loss_scale=4096.0, verbosity=0)
    for factor in (1.0, float("inf")):
        with preamp.scale_loss(model(torch.ones(1, 3)).float().sum(), optimizer) as scaled:
            (scaled * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    preamp.save_checkpoint(path, model, optimizer, scheduler, {"epoch": 3, "best": torch.ones(5)})
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_it_tells_what_is_inside(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"run{suffix}")
    done = invoke(path)
    assert done.exit_code == 0, done.output
    for part in (
        ": verified, ",
        f"preamp {preamp.__version__} with torch {torch.__version__}, content version 1, 1 rank\n",
        "opt level O2, loss scale 2048\n",
        "optimizer 0: 1 steps applied, 1 skipped",
        "torch.optim.adam.Adam over 2 parameters, storage full",
        "torch.optim.lr_scheduler.StepLR",
        "extra: epoch, best",
        "torch.nn.modules.linear.Linear",
        "2 × 3",
    ):
        assert part in done.output
    found = json.loads(invoke(path, "--json").output)
    assert found["status"] == "verified"
    assert found["size"] == path.stat().st_size
    assert found["models"][0]["tensors"] == [
        {"name": "weight", "shape": [2, 3], "dtype": "float32"},
        {"name": "bias", "shape": [2], "dtype": "float32"},
    ]
    sizes = found["bytes"]
    assert sizes["models"] == 8 * 4
    assert sizes["optimizers"] == 2 * 8 * 4 + 2 * 4  # two moments, and a counter for each parameter
    assert sizes["extra"] == 5 * 4
    assert sizes["gradients"] == sizes["schedulers"] == 0
    assert sizes["random states"] > 0


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damage_is_told_with_status_2(suffix: str, tmp_path: Path) -> None:
    good = save(tmp_path / f"good_1{suffix}")
    path = tmp_path / f"bad_2{suffix}"
    data = bytearray(good.read_bytes())
    place = data.index(torch.ones(5).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    done = invoke(path)
    assert done.exit_code == 2
    assert "the checksum of its part 'extra/best' is wrong" in done.stderr
    assert f"Show {good}, the newest complete checkpoint" in done.stderr
    assert f"{path} is not shown: " in done.stderr
    assert "load" not in done.stderr
    told = invoke(path, "--json")
    assert told.exit_code == 2
    found = json.loads(told.stdout)
    assert found["status"] == "refused"
    assert "checksum" in found["reason"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    missing = invoke(tmp_path / "none.pt")
    assert missing.exit_code == 2
    assert "There is no file" in missing.stderr
    assert "load" not in missing.stderr
    (tmp_path / "text.pt").write_text("hello, this is text")
    foreign = invoke(tmp_path / "text.pt")
    assert foreign.exit_code == 2
    assert "it is in neither of the two formats" in foreign.stderr
    assert invoke(tmp_path).exit_code == 2


def test_a_checkpoint_without_extra_says_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    preamp.save_checkpoint(tmp_path / "run.pt", model, optimizer)
    assert "extra: none\n" in invoke(tmp_path / "run.pt").output
    assert json.loads(invoke(tmp_path / "run.pt", "--json").output)["extra"] == "none"
