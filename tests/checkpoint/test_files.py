# SPDX-License-Identifier: BSD-3-Clause
"""What is written to the disk, and what happens if that fails or the file is damaged later."""

import errno
import os
import pickle
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

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import preamp
from kit.compare import same
from kit.refusals import refused
from kit.saved import STEP, SavedRun
from preamp import CheckpointError
from preamp.checkpoint import latest_checkpoint, storage
from preamp.core import files


class Disk:
    """Saves and loads files of such models.

    A program of `play` says which: ``8`` saves one as ``step_8``, and ``-x`` makes a file of
    somebody else's that is called so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run_1.safetensors"

    def of(self, number: object) -> Path:
        return self.folder / f"step_{number}"

    def save(self, value: float, path: Path | None = None, **options: Any) -> Any:
        model, options = nn.Linear(3, 2), {"extra": {"value": value}, **options}
        for param in model.parameters():
            nn.init.constant_(param, value)
        return preamp.save_checkpoint(path or self.path, model, **options)

    def value(self, path: Path | None = None) -> float:
        """That of all weights in a file, which says it itself as well."""
        model = nn.Linear(3, 2)
        extra = preamp.load_checkpoint(path or self.path, model)
        assert {x for p in model.parameters() for x in p.flatten().tolist()} == {extra["value"]}
        return extra["value"]

    def play(self, program: str, **options: Any) -> None:
        for word in program.split():
            if word.startswith("-"):
                (self.folder / word[1:]).write_bytes(b"mine")
            else:
                self.save(float(word), self.of(word), **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


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


def raw(tensor: torch.Tensor) -> Any:
    """All there is to a tensor but its strides."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    dense = dense.resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tensor.shape, tensor.layout, dense.reshape(-1).view(torch.uint8).tolist()


def test_what_is_saved_comes_back(disk: Disk) -> None:
    shared, value = torch.randn(3), torch.tensor([1 + 2j, 3 - 1j])
    # A lazy conjugate has the memory, shape and strides of what it is of, and other values.
    lazy = [value, value.conj(), value.imag, value.conj().imag]
    given_ = [*TENSORS, *lazy, torch.eye(3).to_sparse(), shared, shared]
    preamp.save_checkpoint(disk.path, extra=[PLAIN, *given_])
    plain, *back = preamp.load_checkpoint(disk.path)
    assert repr(plain) == repr(PLAIN)
    for old, new in zip(given_, back, strict=True):
        assert raw(old) == raw(new)
        assert old.is_sparse or new.stride() in (old.contiguous().stride(), old.stride())
    back[-2][0] = 7.0
    assert back[-1][0] == 7.0  # one tensor, as before


def test_a_slice_is_saved_without_what_it_is_cut_from(disk: Disk) -> None:
    preamp.save_checkpoint(disk.path, extra=torch.zeros(1_000_000)[:2])
    assert disk.path.stat().st_size < 100_000


LOOP: list[Any] = []
LOOP.append(LOOP)
NOT_PLAIN: list[tuple[Any, str, str]] = [
    ({"run": {"args": Disk(Path())}}, "['run']['args']", f"{__name__}.Disk"),
    ([lambda: None], "[0]", "builtins.function"),
    ({"m": nn.Linear(1, 1)}, "['m']", "torch.nn.modules.linear.Linear"),
    ({"s": signal.SIGTERM}, "['s']", "signal.Signals"),
]


def test_other_data_are_refused(disk: Disk) -> None:
    for extra, place, kind in NOT_PLAIN:
        with refused("checkpoint", "data that are not plain", place=place, kind=kind):
            disk.save(1.0, extra=extra)
    with refused("checkpoint", "a tensor without memory"):
        disk.save(1.0, extra={"t": torch.ones(1, device="meta")})
    with refused("checkpoint", "what contains itself"):
        disk.save(1.0, extra=LOOP)
    assert disk.names() == []


def test_permissions_are_those_of_ordinary_files(disk: Disk) -> None:
    disk.play("-plain 1")
    modes = [stat.S_IMODE((disk.folder / name).stat().st_mode) for name in disk.names()]
    assert modes[0] == modes[1]
    disk.of(1).chmod(0o640)
    disk.play("1")
    assert stat.S_IMODE(disk.of(1).stat().st_mode) == 0o640


# -- series --------------------------------------------------------------------------------------


SERIES = [
    # what is saved, keeping two; what others have there; what is left, the newest last
    ("-best -step_5.txt -other_1 8 9 10 11", "best other_1 step_5.txt", "10 11"),
    ("8 9 10 11 9", "", "11 9"),  # a run that went back is the newest nevertheless
    ("-step_2 3 4 5", "step_2", "4 5"),
]


@pytest.mark.parametrize(("program", "others", "kept"), SERIES)
def test_keep_last(program: str, others: str, kept: str, disk: Disk) -> None:
    torch.save({"weight": torch.ones(1)}, disk.of(1))
    disk.play(program, keep_last=2)
    last = [disk.of(number) for number in kept.split()]
    assert disk.names() == sorted(["step_1", *others.split(), *(path.name for path in last)])
    assert latest_checkpoint(disk.folder) == last[-1]


def test_keep_last_refuses(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("checkpoint", "keep_last of zero"):
        disk.play("1", keep_last=0)
    with refused("checkpoint", "a series without a step"):
        disk.save(1.0, disk.folder / "last", keep_last=3)
    assert disk.names() == []
    disk.play("1")

    def unlink(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(PermissionError, match=r"step_2 is written, but .*step_1 beside it"):
        disk.play("2", keep_last=1)
    assert disk.value(disk.of(2)) == 2.0


# -- writing fails -------------------------------------------------------------------------------


def test_another_process_tidies_up_at_that_moment(disk: Disk, monkeypatch: Any) -> None:
    """A draft that is not locked yet looks like one of a process that has died."""
    make, made = tempfile.mkstemp, list[str]()

    def make_and_be_robbed(*args: Any, **options: Any) -> tuple[int, str]:
        handle, name = make(*args, **options)
        if not made:
            files.remove_leftovers(disk.folder, lambda _: True)
        made.append(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", make_and_be_robbed)
    disk.save(1.0)
    assert (len(made), disk.names(), disk.value()) == (2, [disk.path.name], 1.0)


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
def test_a_disk_without_room(size: int, asynchronous: bool, disk: Disk) -> None:
    disk.save(1.0)
    with file_size_limit(size), pytest.raises(OSError, match="cannot be written") as got:
        disk.save(2.0, asynchronous=asynchronous).wait()
    assert str(disk.path) in str(got.value)
    assert "Make room or choose another place" in str(got.value)
    assert (disk.names(), disk.value()) == ([disk.path.name], 1.0)
    disk.save(3.0)
    assert disk.value() == 3.0


def test_an_error_in_the_background_reaches_the_next_call(disk: Disk) -> None:
    disk.play("-file")
    saving = disk.save(1.0, disk.folder / "file" / "a", asynchronous=True)
    with pytest.raises(OSError, match="cannot be written"):
        disk.save(2.0)
    assert saving.done
    assert saving.wait() == disk.folder / "file" / "a"  # told once
    disk.save(2.0)
    assert disk.value() == 2.0


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
def test_nothing_is_lost_at_exit(disk: Disk) -> None:
    disk.play("-file")
    paths = disk.path, disk.folder / "file" / "a"
    call = [sys.executable, "-c", EXITS]
    good, bad = (
        subprocess.run([*call, str(path)], capture_output=True, text=True, check=True).stderr
        for path in paths
    )
    assert preamp.load_checkpoint(disk.path).shape == (4_000_000,)
    assert good == ""
    assert bad.startswith("preamp: ")
    assert f"{paths[1]} cannot be written" in bad


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set nothing is written."""
    event, write = threading.Event(), storage.write

    def late(*args: Any, **options: Any) -> None:
        assert event.wait(60)
        write(*args, **options)

    monkeypatch.setattr("preamp.checkpoint.saving.write", late)
    return event


def test_training_goes_on_while_the_file_is_written(disk: Disk, may_write: Any) -> None:
    """What is written is what was there when the call returned."""
    run = SavedRun("O2").play(STEP)
    saving = run.save(disk.path, asynchronous=True)
    expected = run.numbers()
    assert not saving.done
    run.play(STEP, "random_backward; scheduled_step")
    may_write.set()
    assert saving.wait() == disk.path
    run.load(disk.path)
    assert same(run.numbers(), expected)


def test_a_relative_path_is_one_of_the_call(disk: Disk, may_write: Any, monkeypatch: Any) -> None:
    elsewhere = Disk(disk.folder / "elsewhere")
    elsewhere.folder.mkdir()
    monkeypatch.chdir(disk.folder)
    saving = disk.save(1.0, Path("runs/step_1"), asynchronous=True)
    monkeypatch.chdir(elsewhere.folder)
    may_write.set()
    saving.wait()
    assert elsewhere.names() == []
    assert disk.value(disk.folder / "runs" / "step_1") == 1.0


def test_what_was_loaded_does_not_change_with_the_file(disk: Disk) -> None:
    """As ``cp`` changes one, in place."""
    for number in (1, 2):
        preamp.save_checkpoint(disk.of(number), extra=torch.full((5000,), float(number)))
    extra = preamp.load_checkpoint(disk.of(1))
    shutil.copyfile(disk.of(2), disk.of(1))
    assert set(extra.tolist()) == {1.0}


# -- damaged and hostile files -------------------------------------------------------------------


@contextmanager
def unchanged(run: SavedRun) -> Iterator[None]:
    """Also its random states."""
    before, identities = run.numbers(), [id(o.state) for o in run.optimizers]
    of_numpy = np.random.get_state()[1].tolist()
    yield
    assert same(run.numbers(), before)
    assert [id(o.state) for o in run.optimizers] == identities
    assert np.random.get_state()[1].tolist() == of_numpy


def assert_refused(run: SavedRun, path: Path, *, beside: Path) -> None:
    with unchanged(run), pytest.raises(CheckpointError) as got:
        run.load(path)
    text = str(got.value)
    assert text.startswith(f"{path} is not loaded: ")
    assert "Complete and unchanged files of preamp.save_checkpoint are loaded; nothing was." in text
    assert f"Load {beside}, the newest complete checkpoint in its folder." in text


class Hostile:
    """Unpickles by making a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


HOSTILE: dict[str, Callable[[Path, Hostile], object]] = {
    "pickle": lambda path, bad: path.write_bytes(pickle.dumps(bad)),
    "torch": lambda path, bad: torch.save({"preamp": bad, "tensors": {}}, path),
    "beside": lambda path, bad: torch.save({"preamp": "", "tensors": {}, "x": bad}, path),
    "legacy": lambda path, bad: torch.save(bad, path, _use_new_zipfile_serialization=False),
    "module": lambda path, bad: torch.save(nn.Linear(1, 1), path),
    "foreign": lambda path, bad: torch.save({"model": {}}, path),
    "empty": lambda path, bad: path.write_bytes(b""),
    "text": lambda path, bad: path.write_text("hello " * 100),
    "zip": lambda path, bad: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "script": lambda path, bad: torch.jit.script(nn.ReLU()).save(path),
}


def test_hostile_and_foreign_files(disk: Disk) -> None:
    mark, run = disk.folder / "executed", SavedRun("O1")
    run.save(disk.path)
    for name, make in HOSTILE.items():
        make(disk.folder / f"{name}.bad", Hostile(mark))
        assert_refused(run, disk.folder / f"{name}.bad", beside=disk.path)
        assert not mark.exists()
    pickle.loads((disk.folder / "pickle.bad").read_bytes())
    assert mark.exists()  # it does make one


def test_a_folder_and_a_missing_file(disk: Disk) -> None:
    run, nowhere = SavedRun("O0"), disk.folder / "nowhere"
    assert latest_checkpoint(nowhere) is None
    with unchanged(run), pytest.raises(CheckpointError, match="it is a folder"):
        run.load(disk.folder)
    with unchanged(run), pytest.raises(FileNotFoundError, match="There is no other complete"):
        run.load(nowhere)
    for path in (disk.path, disk.of("damaged"), disk.folder / ".hidden"):  # as one under way is
        disk.save(1.0, path)
    disk.of("damaged").write_bytes(disk.of("damaged").read_bytes()[:-1] + b"?")
    with unchanged(run), pytest.raises(FileNotFoundError, match=r"run_1\..*, the newest"):
        run.load(nowhere)


def test_a_tensor_under_another_name_and_another_digit_of_a_number(disk: Disk) -> None:
    """A file put together again with two parts swapped, and one whose checksum is of another."""
    run = SavedRun("O1").play(STEP)
    run.save(disk.path)
    with safe_open(disk.path, framework="pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    a, b = (n for n in tensors if n.endswith(("0/exp_avg", "0/exp_avg_sq")))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, disk.of("swapped"), about)
    assert_refused(run, disk.of("swapped"), beside=disk.path)
    whole = disk.path.read_bytes()
    assert whole.count(b"65536") == 1  # the loss scale
    disk.of("changed").write_bytes(whole.replace(b"65536", b"65537"))
    assert_refused(run, disk.of("changed"), beside=disk.path)


# -- versions ------------------------------------------------------------------------------------


def test_a_newer_version_is_refused(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(storage, "VERSION", storage.VERSION + 1)
        disk.save(1.0)
    with pytest.raises(CheckpointError, match="which a newer preamp has written"):
        disk.value()


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
    run.play((2 + seed) * STEP)
    run.schedulers = [*run.schedulers, Scheduler()]
    return run


@pytest.mark.parametrize(("level", "storage"), [("O0", "full"), ("O2", "full"), ("O5", "split")])
def test_an_interrupted_scheduler_leaves_models_and_optimizers(
    level: str, storage: str, disk: Disk
) -> None:
    trained(level, storage, 0).save(disk.path)
    run = trained(level, storage, 1)
    with unchanged(run), pytest.raises(KeyboardInterrupt):
        run.load(disk.path)
