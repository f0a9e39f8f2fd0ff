# SPDX-License-Identifier: BSD-3-Clause
"""Conversion to plain data: what comes out, that it loads, and that files stay whole."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from checkpoint.apex_files import AMP, AMP_ATTRIBUTES, SCALERS, apex_class, write_run
from fp16_utils.steps import Weights
from preamp import amp
from preamp.checkpoint import Finding, convert_apex_checkpoint, describe, read_apex_checkpoint
from preamp.checkpoint.apex import convert
from preamp.cli.app import app
from preamp.fp16_utils import FP16_Optimizer

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.pt"
    write_run(path, "amp", zipped=True)
    return path


@FORMATS
@pytest.mark.parametrize("kind", SCALERS)
def test_a_converted_run_goes_on(kind: str, zipped: bool, tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    write_run(src, kind, zipped=zipped)
    convert_apex_checkpoint(src, dst)
    content = torch.load(dst, weights_only=True)
    model = Weights()
    model.load_state_dict(content["model"])
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.25)
    optimizer = FP16_Optimizer(inner, verbose=False)
    optimizer.load_state_dict(content["optimizer"])
    attributes = SCALERS[kind][2]
    assert optimizer.loss_scale == attributes.get("_loss_scale", attributes.get("cur_scale"))
    assert optimizer.dynamic_loss_scale == (kind != "static")
    (master,) = optimizer.all_fp32_from_fp16_params
    assert master.tolist() == [1.0 + 2.0**-20, 3.0]
    assert model.low.tolist() == [1.0, 3.0]
    assert model.wide.tolist() == [5.0, 6.0]
    assert inner.state[master]["momentum_buffer"].tolist() == [0.5, 0.25]
    assert inner.param_groups[0]["lr"] == 0.5


def test_amp_state_in_a_converted_run_loads(run: Path, tmp_path: Path) -> None:
    convert_apex_checkpoint(run, tmp_path / "plain.pt")
    content = torch.load(tmp_path / "plain.pt", weights_only=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.load_state_dict(content["amp"])
    assert amp.state_dict() == content["amp"]


def test_what_is_plain_stays_as_it_was() -> None:
    model = torch.nn.BatchNorm1d(2).state_dict()
    content = {"model": model, "list": [1, (2, "x")], "set": {3}, "none": None}
    assert convert.to_plain(content) is content


def test_containers_keep_type_and_attributes_around_a_record(run: Path) -> None:
    record = read_apex_checkpoint(run)["optimizer"]["loss_scaler"]
    inside: Any = OrderedDict(scaler=record)
    inside._metadata = {"version": 2}
    content = {"pair": (1, [record]), "ordered": inside}
    plain: Any = convert.to_plain(content)
    assert plain["pair"] == (1, [plain["ordered"]["scaler"]])
    assert type(plain["ordered"]) is OrderedDict
    assert plain["ordered"]._metadata == {"version": 2}
    assert plain["ordered"]["scaler"]["loss_scale"] == 512.0
    assert content["ordered"]["scaler"] is record  # the original is not touched


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    text = (
        "The checkpoint contains itself, or is nested too deep. Only containers that end "
        "somewhere can be converted. Load it with read_apex_checkpoint and take out what is needed."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        convert.to_plain({"a": loop})


# -- findings ------------------------------------------------------------------------------------


def test_records_are_found_wherever_they_are(run: Path) -> None:
    record = read_apex_checkpoint(run)["optimizer"]["loss_scaler"]
    content = {
        "list": [1, ({"deep": record}, 2)],
        "optimizer": {"state": {}, "param_groups": [], "scaler": [record]},
        "plain": [1, {"a": 2}],
    }
    kind = "object of apex.amp.scaler.LossScaler"
    assert [(item.key, item.kind) for item in describe(content)] == [
        ("['list'][1][0]['deep']", kind),
        ("['optimizer']", "state of an optimizer"),
        ("['optimizer']['scaler'][0]", kind),
        ("['plain']", "list of 2"),
    ]


def test_findings_name_everything(run: Path, tmp_path: Path) -> None:
    found = convert_apex_checkpoint(run, tmp_path / "plain.pt")
    assert [(item.key, item.kind) for item in found] == [
        ("['epoch']", "int"),
        ("['model']", "state of a model"),
        ("['optimizer']", "state of fp16_utils.FP16_Optimizer"),
        ("['optimizer']['loss_scaler']", "object of apex.amp.scaler.LossScaler"),
        ("['amp']", "amp.state_dict()"),
        ("['history']", "list of 2"),
    ]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"cur_scale": 1.0, "fp32_groups_flat": []}, "state of the flat FP16_Optimizer"),
        ({"cur_scale": 1.0, "fp32_groups": []}, "state of apex.contrib.optimizers.FP16_Optimizer"),
        ([torch.ones(1)], "list of 1"),
        (torch.ones(2, 3).half(), "float16 tensor of shape (2, 3)"),
        ({}, "empty dict"),
    ],
)
def test_other_kinds(content: Any, kind: str) -> None:
    (found,) = describe(content)
    assert found.kind.startswith(kind)
    assert found == Finding(key="", kind=found.kind, becomes=found.becomes)


def doubled(bottom: Any) -> Any:
    """Lists and dicts that hold what is below them twice, 2**60 paths to the bottom."""
    content = bottom
    for _ in range(30):
        content = [content, content]
        content = {"a": content, "b": content}
    return content


def test_what_is_shared_is_looked_at_once(tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    with apex_class(AMP, "LossScaler") as make:
        torch.save(doubled(make(**AMP_ATTRIBUTES)), src)
    found = convert_apex_checkpoint(src, dst)
    assert [item.kind for item in found if item.kind.startswith("object")]
    assert len(found) < 200

    content = torch.load(dst, weights_only=True)
    assert content["a"] is content["b"]
    for _ in range(30):
        content = content["b"][1]
    assert content["loss_scale"] == 512.0


def test_what_is_met_again_is_described_as_its_first() -> None:
    shared = {"optimizer": [[1, 2], [3]]}
    found = [(item.key, item.kind, item.becomes) for item in describe({"x": shared, "y": shared})]
    assert found == [
        ("['x']['optimizer']", "list of 2", "unchanged"),
        ("['y']", "dict of 1", "as ['x']"),
    ]


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["save", "load"])
def test_a_failing_conversion_leaves_the_old_file(
    moment: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "plain.pt"
    dst.write_text("old")
    content = read_apex_checkpoint(run)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(convert, "read_apex_checkpoint", lambda path: content)
    monkeypatch.setattr(torch, moment, fail)
    with pytest.raises(OSError, match="disk full"):
        convert_apex_checkpoint(run, dst)
    assert dst.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt", "plain.pt"}


def test_a_file_is_not_converted_onto_itself(run: Path) -> None:
    before = run.read_bytes()
    text = (
        f"{run} is to be replaced by its own conversion. Source and destination are two files. "
        "Choose another destination, so that the original stays."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        convert_apex_checkpoint(run, run)
    assert run.read_bytes() == before


def test_nothing_but_a_file_is_replaced(run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = f"{pipe} is no regular file. A checkpoint goes to a file of its own. Choose another"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        convert_apex_checkpoint(run, pipe)
    assert pipe.is_fifo()


def test_links_in_a_circle_are_neither_read_nor_replaced(run: Path, tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OSError, match=r"circle cannot be read: Too many .* Check the path"):
        convert_apex_checkpoint(circle, tmp_path / "plain.pt")
    for target in (circle, circle / "plain.pt"):
        with pytest.raises(OSError, match=rf"{target} cannot be written: Too many .* and try"):
            convert_apex_checkpoint(run, target)
    done = invoke(run, circle)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert circle.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"circle", run.name}


def test_a_scaler_that_cannot_be_read_writes_nothing(tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    with apex_class(AMP, "LossScaler") as make:
        torch.save({"loss_scaler": make(_loss_scale="large")}, src)
    with pytest.raises(ValueError, match=r"A loss scaler's state <record of apex\.amp"):
        convert_apex_checkpoint(src, dst)
    assert not dst.exists()


@pytest.mark.parametrize(
    "place",
    [lambda scaler: {scaler: 1}, lambda scaler: {(1, scaler): 1}, lambda scaler: [{scaler}]],
    ids=["key", "tuple", "set"],
)
def test_a_scaler_where_no_dict_can_be_is_refused(place: Any, tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    with apex_class(AMP, "LossScaler") as make:
        torch.save(place(make(**AMP_ATTRIBUTES)), src)
    text = (
        "The checkpoint has a loss scaler as the key of a dict, or in a set. Loss scalers become "
        "dicts, which are values and items of lists. Load it with read_apex_checkpoint and take "
        "out what is needed."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        convert_apex_checkpoint(src, dst)
    assert not dst.exists()


def test_a_class_among_the_data_is_refused(tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    with apex_class(AMP, "LossScaler") as make:
        torch.save({"kind": type(make())}, src)
    with pytest.raises(ValueError, match=r"run\.pt cannot be written as plain data: Can't pickle"):
        convert_apex_checkpoint(src, dst)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_dict_with_methods_of_its_file_is_refused(tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    torch.save({"model": WithMethods()}, src)
    text = (
        "The checkpoint has a dict with its own 'items', 'update'. A dict may have attributes, "
        "but has its class's methods. Do not use the file unless you know why it was written "
        "like that."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        convert_apex_checkpoint(src, dst)
    assert not dst.exists()


class WithMethods:
    """Pickled as an OrderedDict whose attributes hide its methods."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": 1, "_metadata": 2, "update": torch._utils._rebuild_tensor}


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(1, device="meta")])
def test_a_scaler_of_tensors_without_a_number_is_refused(value: Any, tmp_path: Path) -> None:
    src, dst = tmp_path / "run.pt", tmp_path / "plain.pt"
    with apex_class(AMP, "LossScaler") as make:
        torch.save([make(**{**AMP_ATTRIBUTES, "_loss_scale": value})], src)
    with pytest.raises(ValueError, match=r"A loss scaler's state <record of apex\.amp"):
        convert_apex_checkpoint(src, dst)
    assert not dst.exists()


# -- command line --------------------------------------------------------------------------------


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert-checkpoint", *map(str, arguments)])


def test_the_command_converts(run: Path, tmp_path: Path) -> None:
    dst = tmp_path / "plain.pt"
    done = invoke(run, dst)
    assert done.exit_code == 0, done.output
    assert done.output == f"1 object made plain data: {dst}\n"
    assert "model" in torch.load(dst, weights_only=True)


def test_the_command_explains(run: Path, tmp_path: Path) -> None:
    arguments = [str(run), str(tmp_path / "plain.pt"), "--explain"]
    wide = {"COLUMNS": "200"}
    done = CliRunner().invoke(app, ["convert-checkpoint", *arguments], env=wide)
    assert done.exit_code == 0, done.output
    for text in ("run.pt", "['optimizer']", "FP16_Optimizer", "amp.state_dict()", "epoch"):
        assert text in done.output


def test_the_command_refuses(tmp_path: Path) -> None:
    done = invoke(tmp_path / "nowhere.pt", tmp_path / "plain.pt")
    assert done.exit_code == 2
    assert "nowhere.pt" in done.output
    assert not (tmp_path / "plain.pt").exists()
