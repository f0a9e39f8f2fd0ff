# SPDX-License-Identifier: BSD-3-Clause
"""What is written to the disk, and what happens if that fails or the file is damaged later."""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import preamp
from cases.selection import examples
from kit.compare import same
from kit.saved import STEP, SavedRun
from preamp import CheckpointError
from preamp.checkpoint import latest_checkpoint, read_checkpoint, storage
from preamp.core import files

NAME = "run_1.safetensors"


def model_of(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def save(path: Path, value: float, **options: Any) -> Any:
    return preamp.save_checkpoint(path, model_of(value), extra={"value": value}, **options)


def value_in(path: Path) -> float:
    model = model_of(-1.0)
    extra = preamp.load_checkpoint(path, model)
    assert {float(x) for p in model.parameters() for x in p.detach().flatten()} == {extra["value"]}
    return extra["value"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- content -------------------------------------------------------------------------------------

PLAIN: dict[Any, Any] = {
    "numbers": [1, -2.5, float("inf"), float("-inf"), True, None, 10**30, 1e-300, 1j, -0.0],
    "containers": (1, (2, [3]), {4: {5, 6}}, frozenset({7}), OrderedDict(b=1, a=2)),
    "counter": Counter({3: 1}),
    "keys": {1: "int", 2.5: "float", None: "none", (1, "a"): "tuple", "$x": "dollar"},
    "things": [torch.float16, torch.device("cpu"), torch.Size([1, 2]), b"\x00\xff", "ü\n\ud800"],
    "empty": [{}, [], (), "", set()],
}
TENSORS = [
    torch.tensor(3.0),
    torch.empty(0, 3),
    torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.randn(4, 3).t(),
    torch.arange(6).reshape(2, 3)[:, 1:],
    torch.ones(3, dtype=torch.float8_e4m3fn),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.randn(1).expand(3, 2),
    torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
]


def test_plain_data_come_back_as_they_were(tmp_path: Path) -> None:
    preamp.save_checkpoint(tmp_path / NAME, extra=PLAIN)
    back = preamp.load_checkpoint(tmp_path / NAME)
    assert repr(back) == repr(PLAIN)


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.randn(3)
    given_ = [*TENSORS, shared, shared, torch.eye(3).to_sparse()]
    preamp.save_checkpoint(tmp_path / NAME, extra=given_)
    back = preamp.load_checkpoint(tmp_path / NAME)
    for old, new in zip(given_, back, strict=True):
        assert (old.dtype, old.shape, old.layout) == (new.dtype, new.shape, new.layout)
        assert (
            old.is_sparse
            or new.stride() == old.contiguous().stride()
            or (new.stride() == old.stride())
        )
        dense = [t.to_dense() if t.is_sparse else t for t in (old, new)]
        raw = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in dense]
        assert torch.equal(*raw)
    back[-3][0] = 7.0
    assert back[-2][0] == 7.0  # one tensor, as before


def test_a_slice_is_saved_without_what_it_is_cut_from(tmp_path: Path) -> None:
    preamp.save_checkpoint(tmp_path / "a.safetensors", extra=torch.zeros(1_000_000)[:2])
    assert (tmp_path / "a.safetensors").stat().st_size < 100_000


class Options:
    """Not plain data."""


@pytest.mark.parametrize(
    ("extra", "place", "kind"),
    [
        ({"run": {"args": Options()}}, "['run']['args']", "Options"),
        ([lambda: None], "[0]", "function"),
        ({"m": nn.Linear(1, 1)}, "['m']", "Linear"),
        ({"s": signal.SIGTERM}, "['s']", "Signals"),
        ({"t": torch.ones(1, device="meta")}, "['t']", "on meta"),
    ],
)
def test_other_data_are_refused(extra: Any, place: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape(f"the checkpoint['extra']{place} is a ")) as got:
        preamp.save_checkpoint(tmp_path / "a.safetensors", extra=extra)
    assert kind in str(got.value)
    assert names_in(tmp_path) == []


def test_what_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        preamp.save_checkpoint(tmp_path / "a.safetensors", extra=loop)


def test_any_name_is_one_of_safetensors(tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.pt", "a"):
        save(tmp_path / name, 2.0)
        with safe_open(tmp_path / name, framework="pt") as file:
            assert torch.equal(file.get_tensor("models/0/state/weight"), torch.full((2, 3), 2.0))


def test_permissions_are_those_of_ordinary_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save(tmp_path / "a.safetensors", 1.0)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.safetensors")]
    assert modes[0] == modes[1]
    (tmp_path / "a.safetensors").chmod(0o640)
    save(tmp_path / "a.safetensors", 2.0)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


# -- series --------------------------------------------------------------------------------------


def test_keep_last(tmp_path: Path) -> None:
    for name in ("best", "step_5.txt", "other_1"):
        (tmp_path / name).write_bytes(b"mine")
    for step in (8, 9, 10, 11):
        save(tmp_path / f"step_{step}", step, keep_last=2)
    assert names_in(tmp_path) == ["best", "other_1", "step_10", "step_11", "step_5.txt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_11"
    # A run that went back to an earlier step is the newest nevertheless.
    save(tmp_path / "step_9", 9.0, keep_last=2)
    assert "step_10" not in names_in(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_9"


def test_keep_last_leaves_other_files_alone(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "run_1.safetensors")
    (tmp_path / "run_2.safetensors").write_text("mine")
    for step in (3, 4, 5):
        save(tmp_path / f"run_{step}.safetensors", step, keep_last=2)
    assert names_in(tmp_path) == [f"run_{step}.safetensors" for step in (1, 2, 4, 5)]


def test_keep_last_says_what_it_could_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run_1.safetensors", 1.0)

    def unlink(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(PermissionError, match=r"run_2.* is written, but .*run_1.* beside it"):
        save(tmp_path / "run_2.safetensors", 2.0, keep_last=1)
    assert value_in(tmp_path / "run_2.safetensors") == 2.0


def test_keep_last_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        save(tmp_path / "step_1.safetensors", 1.0, keep_last=0)
    with pytest.raises(ValueError, match="Put the step into the name"):
        save(tmp_path / "last.safetensors", 1.0, keep_last=3)
    assert names_in(tmp_path) == []


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("PK\x03\x04 not really")
    assert latest_checkpoint(tmp_path) is None


# -- writing fails -------------------------------------------------------------------------------


def test_another_process_tidies_up_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is not locked yet looks like one of a process that has died."""
    make, made = tempfile.mkstemp, list[str]()

    def make_and_be_robbed(*args: Any, **options: Any) -> tuple[int, str]:
        handle, name = make(*args, **options)
        if not made:
            files.remove_leftovers(tmp_path, lambda _: True)
        made.append(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", make_and_be_robbed)
    save(tmp_path / "a.safetensors", 1.0)
    assert len(made) == 2
    assert names_in(tmp_path) == ["a.safetensors"]
    assert value_in(tmp_path / "a.safetensors") == 1.0


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to make files larger than ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 100, 3000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_without_room(size: int, asynchronous: bool, tmp_path: Path) -> None:
    save(tmp_path / NAME, 1.0)
    with file_size_limit(size), pytest.raises(OSError, match="cannot be written") as got:
        save(tmp_path / NAME, 2.0, asynchronous=asynchronous).wait()
    assert str(tmp_path / NAME) in str(got.value)
    assert "Make room or choose another place" in str(got.value)
    assert names_in(tmp_path) == [NAME]
    assert value_in(tmp_path / NAME) == 1.0
    save(tmp_path / NAME, 3.0)
    assert value_in(tmp_path / NAME) == 3.0


def test_an_error_in_the_background_reaches_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saving = save(tmp_path / "file" / "a.safetensors", 1.0, asynchronous=True)
    with pytest.raises(OSError, match="cannot be written"):
        save(tmp_path / "b.safetensors", 2.0)
    assert saving.done
    assert saving.wait() == tmp_path / "file" / "a.safetensors"  # told once
    save(tmp_path / "b.safetensors", 2.0)
    assert value_in(tmp_path / "b.safetensors") == 2.0


EXITS = """
import sys, threading, torch, preamp
from preamp.checkpoint import saving, storage

def late(*args, **options):
    threading.main_thread().join()  # the interpreter is exiting
    storage.write(*args, **options)

saving.write = late
preamp.save_checkpoint(sys.argv[1], extra=torch.zeros(4_000_000), asynchronous=True)
"""


@pytest.mark.full
def test_nothing_is_lost_at_exit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good, bad = tmp_path / "a.safetensors", tmp_path / "file" / "a.safetensors"
    done = [
        subprocess.run(
            [sys.executable, "-c", EXITS, str(path)], capture_output=True, text=True, check=True
        )
        for path in (good, bad)
    ]
    assert preamp.load_checkpoint(good).shape == (4_000_000,)
    assert done[0].stderr == ""
    assert done[1].stderr.startswith("preamp: ")
    assert f"{bad} cannot be written" in done[1].stderr


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set nothing is written."""
    event, write = threading.Event(), storage.write

    def late(*args: Any, **options: Any) -> None:
        assert event.wait(60)
        write(*args, **options)

    monkeypatch.setattr("preamp.checkpoint.saving.write", late)
    return event


def test_training_goes_on_while_the_file_is_written(
    tmp_path: Path, may_write: threading.Event
) -> None:
    """What is written is what was there when the call returned."""
    run = SavedRun("O2").play(STEP)
    saving = run.save(tmp_path / "a.safetensors", asynchronous=True)
    expected = run.numbers()
    assert not saving.done
    run.play(STEP, "random_backward; scheduled_step")
    may_write.set()
    assert saving.wait() == tmp_path / "a.safetensors"
    run.load(tmp_path / "a.safetensors")
    assert same(run.numbers(), expected)


def test_a_relative_path_is_one_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_write: threading.Event
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = save(Path("runs/step_1.safetensors"), 1.0, asynchronous=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    may_write.set()
    saving.wait()
    assert names_in(tmp_path / "elsewhere") == []
    assert value_in(tmp_path / "runs" / "step_1.safetensors") == 1.0


def test_what_was_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    """As ``cp`` changes one, in place."""
    for number, value in enumerate((1.0, 2.0)):
        preamp.save_checkpoint(tmp_path / f"{number}{NAME}", extra=torch.full((5000,), value))
    extra = preamp.load_checkpoint(tmp_path / f"0{NAME}")
    shutil.copyfile(tmp_path / f"1{NAME}", tmp_path / f"0{NAME}")
    assert set(extra.tolist()) == {1.0}


# -- damaged and hostile files -------------------------------------------------------------------


@contextmanager
def unchanged(run: SavedRun) -> Iterator[None]:
    before, identities = run.numbers(), [id(o.state) for o in run.optimizers]
    yield
    assert same(run.numbers(), before)
    assert [id(o.state) for o in run.optimizers] == identities


def assert_refused(run: SavedRun, path: Path, *, beside: Path) -> None:
    with unchanged(run), pytest.raises(CheckpointError) as got:
        run.load(path)
    text = str(got.value)
    assert text.startswith(f"{path} is not loaded: ")
    assert "Complete and unchanged files of preamp.save_checkpoint are loaded; nothing was." in text
    assert f"Load {beside}, the newest complete checkpoint in its folder." in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good files of different runs."""
    folder = tmp_path_factory.mktemp("fuzz")
    for seed, name in enumerate(("other", "good")):
        run = SavedRun("O2", "SGD", seed=seed).play(STEP)
        run.save(folder / f"{name}.safetensors")
        run.close()
    return folder


def damaged(data: st.DataObject, good: bytes, other: bytes) -> bytes:
    kind = data.draw(st.sampled_from(["cut", "flip", "splice", "swap", "grow", "zero"]))
    at = data.draw(st.integers(0, len(good) - 1))
    to = min(len(good), at + data.draw(st.integers(1, 2000)))
    if kind == "cut":
        return good[:at]
    if kind == "flip":
        return good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
    if kind == "splice":
        return good[:at] + other[at:to] + good[to:]
    if kind == "swap":
        return good[:at] + good[to : 2 * to - at] + good[at:to] + good[2 * to - at :]
    if kind == "grow":
        return good[:at] + bytes(to - at) + good[at:]
    return good[:at] + bytes(to - at) + good[to:]


@given(data=st.data())
@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
def test_a_damaged_file_is_refused_or_whole(folder: Path, data: Any) -> None:
    """Bytes that say nothing, such as those between two parts, may be others."""
    path, run = folder / "damaged.safetensors", SavedRun("O2", "SGD", seed=2)
    good, other = (folder / f"{name}.safetensors" for name in ("good", "other"))
    path.write_bytes(damaged(data, good.read_bytes(), other.read_bytes()))
    try:
        read_checkpoint(path)
    except CheckpointError:
        assert_refused(run, path, beside=good)
    else:
        run.load(path)
        numbers = run.numbers()
        run.load(good)
        assert same(run.numbers(), numbers)
    path.unlink()
    run.close()


class Hostile:
    """Unpickles by making a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def hostile_files(mark: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    thing = Hostile(mark)
    yield "pickle", lambda path: path.write_bytes(pickle.dumps(thing))
    yield "torch", lambda path: torch.save({"preamp": thing, "tensors": {}}, path)
    yield "beside", lambda path: torch.save({"preamp": "", "tensors": {}, "x": thing}, path)
    yield "legacy", lambda path: torch.save(thing, path, _use_new_zipfile_serialization=False)
    yield "module", lambda path: torch.save(nn.Linear(1, 1), path)
    yield "foreign", lambda path: torch.save({"model": {}}, path)
    yield "empty", lambda path: path.write_bytes(b"")
    yield "text", lambda path: path.write_text("hello " * 100)
    yield "zip", lambda path: zipfile.ZipFile(path, "w").writestr("a", "b")
    yield "script", lambda path: torch.jit.script(nn.ReLU()).save(path)


def test_hostile_and_foreign_files(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    run = SavedRun("O1")
    run.save(tmp_path / "good.safetensors")
    for name, make in hostile_files(mark):
        path = tmp_path / f"{name}.bad"
        make(path)
        assert_refused(run, path, beside=tmp_path / "good.safetensors")
        assert not mark.exists()
    pickle.loads((tmp_path / "pickle.bad").read_bytes())
    assert mark.exists()  # it does make one


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    run = SavedRun("O0")
    with unchanged(run), pytest.raises(CheckpointError, match="it is a folder"):
        run.load(tmp_path)
    with unchanged(run), pytest.raises(FileNotFoundError, match="There is no other complete"):
        run.load(tmp_path / "nowhere.safetensors")
    save(tmp_path / "good.safetensors", 1.0)
    with unchanged(run), pytest.raises(FileNotFoundError, match=r"good\..*, the newest"):
        run.load(tmp_path / "nowhere.safetensors")


def test_a_tensor_under_another_name(tmp_path: Path) -> None:
    """A file put together again with two parts swapped."""
    run = SavedRun("O1").play(STEP)
    run.save(tmp_path / "good.safetensors")
    with safe_open(tmp_path / "good.safetensors", framework="pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    a, b = (n for n in tensors if n.endswith(("0/exp_avg", "0/exp_avg_sq")))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, tmp_path / "swapped.safetensors", about)
    assert_refused(run, tmp_path / "swapped.safetensors", beside=tmp_path / "good.safetensors")


# -- versions ------------------------------------------------------------------------------------


def test_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(storage, "VERSION", storage.VERSION + 1)
        save(tmp_path / "new.safetensors", 1.0)
    with pytest.raises(CheckpointError, match="which a newer preamp has written"):
        preamp.load_checkpoint(tmp_path / "new.safetensors")


# -- loads that fail half-way -----------------------------------------------------------------


class Scheduler:
    """One that is interrupted while it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps"] == 1:
            state["steps"] = 2
            raise KeyboardInterrupt


def trained(level: str, storage: str, seed: int) -> SavedRun:
    run = SavedRun(level, "FusedAdam", seed=seed, storage=storage)
    # It cannot be written to, since its elements share memory.
    run.models[0].register_buffer("mask", torch.ones(1, 4).expand(4, 4), persistent=False)
    run.play(2 * STEP)
    run.schedulers = [Scheduler()]
    return run


@pytest.mark.parametrize(("level", "storage"), [("O0", "full"), ("O2", "full"), ("O5", "split")])
def test_an_interrupted_scheduler_leaves_models_and_optimizers(
    level: str, storage: str, tmp_path: Path
) -> None:
    trained(level, storage, 0).save(tmp_path / "a.safetensors")
    run = trained(level, storage, 1)
    before = run.numbers()
    with pytest.raises(KeyboardInterrupt):
        run.load(tmp_path / "a.safetensors")
    assert same(run.numbers(), before)
