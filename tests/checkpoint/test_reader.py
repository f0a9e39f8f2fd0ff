# SPDX-License-Identifier: BSD-3-Clause
"""Reading files of Apex: what is understood, and that nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import attack_pickles
from checkpoint.apex_files import AMP, OLD, SCALERS, apex_class, write_run
from preamp.checkpoint import ApexRecord, plain_loss_scaler, read_apex_checkpoint
from preamp.compat.scaler import LossScaler

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(content: Any, path: Path, zipped: bool) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@FORMATS
@pytest.mark.parametrize("kind", SCALERS)
def test_scalers_come_back_as_records(kind: str, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write_run(path, kind, zipped=zipped)
    assert "apex" not in sys.modules
    content = read_apex_checkpoint(path)
    record = content["optimizer"]["loss_scaler"]
    module, name, attributes = SCALERS[kind]
    assert isinstance(record, ApexRecord)
    assert record.class_name == f"{module}.{name}"
    assert repr(record) == f"<record of {module}.{name}>"
    assert record.attributes.keys() == attributes.keys()
    assert all(record.attributes[key] == value for key, value in attributes.items())
    assert content["model"]["low"].dtype is torch.float16
    assert (content["epoch"], content["history"]) == (3, [0.5, (1, "two")])


@FORMATS
def test_plain_files_are_read_as_torch_reads_them(zipped: bool, tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2)
    path = save({"model": model.state_dict(), "n": OrderedDict(a=1)}, tmp_path / "m.pt", zipped)
    read = read_apex_checkpoint(str(path))
    assert type(read["model"]) is OrderedDict
    assert read["model"]._metadata == model.state_dict()._metadata
    assert all(torch.equal(read["model"][k], v) for k, v in model.state_dict().items())


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write_run(path, "amp", zipped=True)
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as threads:
        read = list(threads.map(read_apex_checkpoint, [path] * 100))
    assert all(isinstance(content["optimizer"]["loss_scaler"], ApexRecord) for content in read)
    with pytest.raises(ValueError, match="asks for eval"):
        read_apex_checkpoint(save(Calls(eval, "1"), tmp_path / "b.pt", True))
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_record_without_attributes(tmp_path: Path) -> None:
    with apex_class(AMP, "LossScaler") as make:
        path = save(make(), tmp_path / "empty.pt", True)
    assert read_apex_checkpoint(path).attributes == {}


# -- hostile files -------------------------------------------------------------------------------


class Calls:
    """Unpickles by calling a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


HOSTILE = {
    "os.system": (os.system, ("touch {marker}",), f"{os.name}.system"),
    "eval": (eval, ("open({marker!r}, 'w')",), "eval"),
    "exec": (exec, ("open({marker!r}, 'w')",), "exec"),
    "getattr": (getattr, ("x", "upper"), "getattr"),
    "import": (__import__, ("antigravity",), "__import__"),
    "pickle in a pickle": (pickle.loads, (b"N.",), "pickle.loads"),
    "torch.load": (torch.load, ("{marker}",), "torch.serialization.load"),
    "class of the script": (LossScaler, (1.0,), "preamp.compat.scaler.LossScaler"),
}


@FORMATS
@pytest.mark.parametrize("place", ["alone", "in a list", "as a value", "among the arguments"])
@pytest.mark.parametrize("name", HOSTILE)
def test_code_is_refused_by_name(name: str, place: str, zipped: bool, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    function, arguments, shown = HOSTILE[name]
    filled = [a.format(marker=str(marker)) if isinstance(a, str) else a for a in arguments]
    call: Any = Calls(function, *filled)
    content = {
        "alone": call,
        "in a list": [torch.ones(1), [call]],
        "as a value": {"model": {"w": torch.ones(1)}, "extra": call},
        "among the arguments": Calls(OrderedDict, [("key", call)]),
    }[place]
    path = save(content, tmp_path / "bad.pt", zipped)
    with pytest.raises(ValueError, match=re.escape(f"{path} asks for {shown}, which is neither")):
        read_apex_checkpoint(path)
    assert not marker.exists()


def test_the_refusal_in_full(tmp_path: Path) -> None:
    path = save(Calls(eval, "1"), tmp_path / "bad.pt", True)
    text = (
        f"{path} asks for eval, which is neither a tensor nor plain data. Tensors, plain "
        "containers and records of apex.amp.scaler.LossScaler, "
        "apex.fp16_utils.loss_scaler.LossScaler, apex.fp16_utils.loss_scaler.DynamicLossScaler "
        "are read; anything else could run code, so nothing of the file was used. If you trust "
        "its origin, load it with torch.load(path, weights_only=False), take out what is not "
        "plain data, and save it again."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_apex_checkpoint(path)


@FORMATS
@pytest.mark.parametrize("module", [AMP, OLD])
def test_a_class_of_apex_s_name_cannot_bring_code(
    module: str, zipped: bool, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"

    def system(self: object) -> Any:
        return os.system, (f"touch {marker}",)

    with apex_class(module, "LossScaler", __reduce__=system) as make:
        path = save({"loss_scaler": make()}, tmp_path / "bad.pt", zipped)
    with pytest.raises(ValueError, match=rf"asks for {os.name}\.system"):
        read_apex_checkpoint(path)
    assert not marker.exists()


def pickled_as(**members: Any) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        with apex_class(AMP, "LossScaler", **members) as make:
            return save(make(), path, True)

    return write


@pytest.mark.parametrize(
    "write",
    [
        pickled_as(__reduce__=lambda self: (type(self), ("arguments",))),
        pickled_as(__getnewargs__=lambda self: ("arguments",)),
        pickled_as(__getstate__=lambda self: ["no", "dict"]),
        pickled_as(__getstate__=lambda self: (None, {"class_name": "slots"})),
        pickled_as(__getstate__=lambda self: {1: "no name"}),
    ],
    ids=["reduce", "new", "list state", "slots state", "odd keys"],
)
def test_records_take_a_dict_and_nothing_else(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "odd.pt")
    cause = (
        r"(ApexRecord\.__new__\(\) takes 1 .*|apex\S+ has a state of its own kind|UnpicklingError)"
    )
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(path))} cannot be read: {cause}\. Files"
    ):
        read_apex_checkpoint(path)


def test_attributes_do_not_become_methods(tmp_path: Path) -> None:
    with apex_class(AMP, "LossScaler") as make:
        odd = make(__class__="x", class_name="y", attributes="z", __reduce__="w")
        path = save(odd, tmp_path / "odd.pt", True)
    record = read_apex_checkpoint(path)
    assert isinstance(record, ApexRecord)
    assert record.class_name == f"{AMP}.LossScaler"
    assert record.attributes["attributes"] == "z"


# -- files that are none -------------------------------------------------------------------------


BOMBS = dict(attack_pickles.bombs())


@pytest.mark.parametrize("wrap", [bytes, attack_pickles.legacy, attack_pickles.zipped])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("bytearray", "asks for a bytearray of any size"),
        ("bytearray made", "asks for a bytearray of any size"),
        ("tensor", "asks for a Tensor of any size"),
        ("tensor of old", "asks for a FloatTensor of any size"),
        ("punycode", "asks for an encoding that takes too long"),
        ("punycode spelled", "asks for an encoding that takes too long"),
        ("shared keys", "tuples in tuples without end"),
        ("shared in a set", "tuples in tuples without end"),
        ("shared sizes", "tuples in tuples without end"),
        ("deep keys", "tuples in tuples without end"),  # which would end the process
        ("deep set", "tuples in tuples without end"),
    ],
)
def test_bombs_are_refused(
    name: str, cause: str, wrap: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "bomb.pt"
    path.write_bytes(wrap(b"\x80\x02" + BOMBS[name] + b"."))
    with pytest.raises(ValueError, match=cause):
        read_apex_checkpoint(path)


@FORMATS
def test_tuples_and_bytes_are_read(zipped: bool, tmp_path: Path) -> None:
    shared = ("a", (1, 2))
    content = {(shared, shared): b"\x00\xff", "punycoded": (tuple(range(20_000)), b"x")}
    assert read_apex_checkpoint(save(content, tmp_path / "m.pt", zipped)) == content


@pytest.mark.parametrize(
    "name", ["directory of another", "same name twice", "zip in a comment", "zip of two, bomb last"]
)
def test_a_zip_is_the_same_to_all_readers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attack_pickles, "ZEROS", 0)
    files = attack_pickles.files(tmp_path, tmp_path / "mark")
    path = tmp_path / "two.pt"
    path.write_bytes(next(content for what, content in files if what == name) or b"")
    with pytest.raises(ValueError, match=r"several ways|compressed|Bad magic number"):
        read_apex_checkpoint(path)


def test_a_state_that_holds_itself_many_times_is_no_scaler() -> None:
    shared: Any = ()
    for _ in range(40):
        shared = (shared, shared)
    with pytest.raises(ValueError, match="A loss scaler's state") as got:
        plain_loss_scaler({"dynamic": shared, "loss_scale": shared})
    assert len(str(got.value)) < 1000


def plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))


def cut_short(path: Path) -> None:
    torch.save(torch.ones(100), path)
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    "write", [plain_pickle, cut_short, Path.touch, lambda path: path.write_text("epoch 3")]
)
def test_files_that_torch_did_not_write(write: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "none.pt"
    write(path)
    with pytest.raises(ValueError, match=r"cannot be read: .*Files written by torch\.save are"):
        read_apex_checkpoint(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_apex_checkpoint(tmp_path / "nowhere.pt")


# -- scalers -------------------------------------------------------------------------------------


def test_a_record_of_amp_s_scaler_in_numbers() -> None:
    class Live:
        def __init__(self) -> None:
            self.__dict__.update(SCALERS["amp"][2])

    assert plain_loss_scaler(Live()) == {
        "dynamic": True,
        "loss_scale": 512.0,
        "unskipped": 42,
        "scale_factor": 2.0,
        "scale_window": 100,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**20,
    }


@pytest.mark.parametrize("source", [{}, {"dynamic": True}, object(), 3, None, type("T", (), {})()])
def test_other_things_are_no_scalers(source: object) -> None:
    with pytest.raises(ValueError, match=r"^A loss scaler's state .* cannot be read .*Needed are "):
        plain_loss_scaler(source)
