# SPDX-License-Identifier: BSD-3-Clause
"""What the page on checkpoints promises, attacked: the disk, other processes, and crafted files."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import preamp
from attack_cases import VALUES, rewrite
from checkpoint.test_files import unchanged
from engine.test_interrupts import interrupt, lines_of
from kit.refusals import refused
from kit.saved import STEP, SavedRun
from preamp.checkpoint import latest_checkpoint, read_checkpoint, saving, storage
from preamp.checkpoint.capture import capture
from preamp.checkpoint.subjects import Subjects
from preamp.numerics import read_history

NAME = "run_1.safetensors"


# -- to the disk and back -------------------------------------------------------------------------


def test_all_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, os.replace

    def note(kind: str, status: os.stat_result) -> None:
        events.append((kind, status.st_ino, status.st_size))

    def synced(handle: int) -> None:
        fsync(handle)
        status = os.fstat(handle)
        note("sync folder" if stat.S_ISDIR(status.st_mode) else "sync file", status)

    def replaced(source: str, target: str) -> None:
        replace(source, target)
        note("replace", os.stat(target))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    preamp.save_checkpoint(tmp_path / NAME, extra=torch.arange(1000))
    own = (tmp_path / NAME).stat()
    folder = tmp_path.stat().st_ino
    assert [event[:2] for event in events] == [
        ("sync file", own.st_ino),
        ("replace", own.st_ino),
        ("sync folder", folder),
    ]
    assert events[0][2] == own.st_size  # all of it, with nothing left in a buffer


def test_other_programs_read_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    given = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.randn(2, 3, dtype=torch.float64),
        "c": torch.empty(0, 4),
        "d": torch.tensor(True),
        "e": torch.randn(5).bfloat16(),
    }
    for place in (tmp_path / "a.safetensors", tmp_path / "a.pt", tmp_path / "a"):
        preamp.save_checkpoint(place, extra=given)
        with safe_open(place, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for name, value in given.items():
                found = file.get_tensor(f"extra/{name}")
                assert found.dtype == value.dtype
                assert torch.equal(found, value)


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into its place while it is read, the next one does not mix with it."""
    path, read = tmp_path / NAME, storage.read_tensors
    preamp.save_checkpoint(path, extra=torch.zeros(10_000))

    def late(file: Any) -> Any:
        preamp.save_checkpoint(path, extra=torch.ones(50))
        return read(file)

    monkeypatch.setattr(storage, "read_tensors", late)
    assert torch.equal(preamp.load_checkpoint(path), torch.zeros(10_000))


def test_masters_are_saved_as_they_lie() -> None:
    """Each copy would cost the memory of all weights once more."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    state = capture(Subjects.of(model, optimizer, None), None)["models"][0]["state"]
    masters = [master.data_ptr() for master in preamp.master_params(optimizer)]
    assert [value.data_ptr() for value in state.values()] == masters
    assert not set(masters) & {value.data_ptr() for value in model.state_dict().values()}


# -- which one is the newest ----------------------------------------------------------------------


def test_copies_keep_their_order(tmp_path: Path) -> None:
    for step in (900, 1000, 50):  # the run went back to an earlier one
        preamp.save_checkpoint(tmp_path / "runs" / f"step_{step}", extra=step)
    copies = tmp_path / "copies"
    copies.mkdir()
    for step in (50, 1000, 900):
        shutil.copyfile(tmp_path / "runs" / f"step_{step}", copies / f"step_{step}")
    os.utime(copies / "step_900", ns=(10**18, 4 * 10**18))
    assert latest_checkpoint(copies) == copies / "step_50"
    preamp.save_checkpoint(copies / "step_60", extra=60, keep_last=2)
    assert sorted(path.name for path in copies.iterdir()) == ["step_50", "step_60"]


def set_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another process, which has saved and loaded nothing."""
    order = storage.Order()
    for module in (storage, saving):
        monkeypatch.setattr(module, "ORDER", order)


def test_a_clock_that_is_behind_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on on another machine: what it saves there is newer than what it has loaded."""
    path = tmp_path / "step_1"
    set_order(monkeypatch)
    preamp.save_checkpoint(path, extra=1)
    set_order(monkeypatch)
    monkeypatch.setattr(storage.time, "time_ns", lambda: 10**18)
    assert preamp.load_checkpoint(path) == 1
    for step in (2, 3, 4):
        preamp.save_checkpoint(tmp_path / f"step_{step}", extra=step, keep_last=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_3", "step_4"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_4"


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="open files cannot be counted here")
def test_what_was_read_holds_no_file_open(tmp_path: Path) -> None:
    """A process may open few files at once, and keep what it has read of many."""
    preamp.save_checkpoint(tmp_path / NAME, extra=torch.arange(3))
    before = len(os.listdir("/dev/fd"))
    kept = [read_checkpoint(tmp_path / NAME) for _ in range(5)]
    assert len(os.listdir("/dev/fd")) == before
    assert kept[4]["extra"].tolist() == [0, 1, 2]


class Listed:
    """A scheduler whose state is a list."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> list[int]:
        return [self.number]

    def load_state_dict(self, state: list[int]) -> None:
        (self.number,) = state


class Named(torch.nn.Linear):
    """A module whose version is no number."""

    _version = "1.2"


def test_objects_of_any_form_load_what_they_saved(tmp_path: Path) -> None:
    preamp.save_checkpoint(tmp_path / "a.safetensors", Named(1, 1), schedulers=Listed(3))
    scheduler = Listed(0)
    preamp.load_checkpoint(tmp_path / "a.safetensors", Named(1, 1), schedulers=scheduler)
    assert scheduler.number == 3


def test_errors_of_this_machine_are_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preamp.save_checkpoint(tmp_path / "a.safetensors", extra=torch.ones(2))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", fail)
    with pytest.raises(RuntimeError, match=r"^can't allocate memory$"):
        preamp.load_checkpoint(tmp_path / "a.safetensors")


# -- all or nothing -------------------------------------------------------------------------------


@pytest.fixture
def another() -> Iterator[Callable[[], None]]:
    """Let numpy's global generator be another one; it is what it was afterwards."""
    before = np.random.get_bit_generator()
    yield lambda: np.random.set_bit_generator(np.random.PCG64(7))
    np.random.set_bit_generator(before)


def test_another_generator_of_numpy_is_refused_before_anything_is_written(
    another: Callable[[], None], tmp_path: Path
) -> None:
    path, model = tmp_path / "a.safetensors", torch.nn.Linear(2, 2)
    preamp.save_checkpoint(path, torch.nn.Linear(2, 2))
    before = model.weight.clone()
    another()
    with refused("checkpoint", "another generator of numpy"):
        preamp.save_checkpoint(tmp_path / "b.safetensors", extra=1)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="random states that cannot be set"):
        preamp.load_checkpoint(path, model, rng=True)
    assert torch.equal(model.weight, before)


GONE = VALUES[-1]  # takes away what is there
SCALER = ("engines", 0, "scalers", "$ordered", 0, 1)
CRAFTED: dict[str, tuple[tuple[Any, ...], Any]] = {  # a place in the file, and what stands there
    "too few words": (("rng", "numpy", "key"), [1, 2]),
    "beyond the words": (("rng", "numpy", "pos"), 10**6),
    "a generator of no name": (("rng", "numpy", "bit_generator"), "Own"),
    "no state of torch": (("rng", "torch"), "x"),
    "a version of Python's": (("rng", "python", "$tuple", 0), None),
    "no random states": (("rng",), GONE),
    "a counter beyond its tensor": ((*SCALER, "unskipped"), 2**70),
    "a scale beyond float32": ((*SCALER, "loss_scale"), 1e300),
    "a number without an end": ((*SCALER, "loss_scale"), 10**400),
    "a scale that is a size": ((*SCALER, "loss_scale"), {"$size": [1, 2]}),
    "a scale that is a word": ((*SCALER, "loss_scale"), "x"),
    "a weight under a number": (("models", 0, "state"), {"$dict": [[5, None]]}),
    "a scheduler of no class": (("schedulers", 0, "class"), 5),
    "a flag beyond float32": (("engines", 0, "found_inf", 0), 1e308),
    "no state of an engine": (("engines", 0), [[1]]),
    "a habit that is many": (("engines", 0, "clips", 0), {"$tensor": "rng/torch"}),
    "no rank": (("ranks",), 1),
    "a list for a dict": (("models", 0, "metadata"), [1]),
    "a version that is none": (("models", 0, "metadata", "bn", "version"), {}),
    "parameters of one number": (
        ("optimizers", 0, "state", "param_groups", 0, "params"),
        [0, 0, 0, 0, 0, 0],
    ),
    "a state that is no dict": (("optimizers", 0, "state", "state", "$dict", 0, 1), 4),
    "an optimizer more in an engine": (("engines", 0, "clips"), [False, True]),
    "a parameter without a dtype": (("optimizers", 0, "params", 0, "dtype"), GONE),
    "fewer parameters": (("optimizers", 0, "params", -1), GONE),
    "no content": ((), {}),
}
"""Files that loading once broke, or that it might."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "a.safetensors"
    SavedRun("O2", "SGD").play(STEP).save(path)
    return path


@pytest.mark.parametrize("case", CRAFTED)
def test_what_does_not_fit_is_refused_before_the_first_change(
    case: str, good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "crafted.safetensors"
    place, value = CRAFTED[case]
    rewrite(good, path, "manifest", ("tree", *place), value)
    run = SavedRun("O2", "SGD", seed=1).play(STEP)
    with unchanged(run), pytest.raises((preamp.PreampError, ValueError)) as got:
        run.load(path)
    assert (
        isinstance(got.value, preamp.CheckpointError)
        or "nothing was" in str(got.value)
        or (str(got.value).count(". ") >= 2)
    )
    run.load(good)


# -- files that cost more than they are -----------------------------------------------------------


def test_messages_have_an_end(tmp_path: Path) -> None:
    header = json.dumps({"x" * 10**6: {}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "b.jsonl").write_text(json.dumps({"kind": "run", "version": "x" * 10**6}) + "\n")
    with pytest.raises(preamp.CheckpointError) as got:
        read_checkpoint(tmp_path / "a.safetensors")
    assert len(str(got.value)) < 10_000
    with pytest.raises(ValueError, match="is not a record of a run") as long:
        read_history(tmp_path / "b.jsonl")
    assert len(str(long.value)) < 10_000


# -- interrupts -----------------------------------------------------------------------------------

FILES = ("files.py", "safetensors.py", "storage.py", "saving.py")


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.full)])
def test_interrupted_at_any_line_of_a_save(every: int, tmp_path: Path) -> None:
    def save(number: int) -> None:
        preamp.save_checkpoint(tmp_path / NAME, extra=[number, torch.full((9,), float(number))])

    save(0)
    lines = [at for at in lines_of(partial(save, 0)) if at.code.co_filename.endswith(FILES)]
    assert len(lines) > 100
    for number, line in enumerate(lines[::every], 1):
        save(0)
        assert interrupt(partial(save, number), line)
        said, values = read_checkpoint(tmp_path / NAME)["extra"]
        assert set(values.tolist()) == {said} <= {0, number}
    save(0)  # and removes what the last one may have left
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


# -- processes that are killed ---------------------------------------------------------------------


TOOL = Path(__file__).parents[2] / "tools" / "attack_saves.py"
KILLS = int(os.environ.get("PREAMP_KILLS", "8"))


def test_killed_while_saving(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    call = [sys.executable, "-W", "ignore", str(TOOL), "--kills", str(KILLS), "--saves", "0"]
    done = subprocess.run([*call, "--out", str(rows)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed = json.loads(rows.read_text(encoding="utf-8"))["kinds"]["kills"]
    assert killed["kills"] >= KILLS
    assert killed["unfinished"] > 0
    assert killed["files"] > 0


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / ".step_7.safetensors.abcdefgh.part"
    for path in (dead, tmp_path / ".other_7.safetensors.abcdefgh.part", tmp_path / "mine.part"):
        path.write_bytes(b"half")
    preamp.save_checkpoint(tmp_path / "step_8.safetensors", extra=1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other_7.safetensors.abcdefgh.part", "mine.part", "step_8.safetensors"]
