# SPDX-License-Identifier: BSD-3-Clause
"""Runs in the files of ``torch.distributed.checkpoint``, alone and on ranks: ``preamp.RunState``.

What begins with ``check_`` runs on ranks, and with ``own_`` is of files that each has for itself.
"""

import functools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.tensor import distribute_tensor, init_device_mesh

import preamp
from cases.ranks import run_ranks
from cases.selection import combinations
from cases.tolerances import assert_same
from distributed.ranks import KINDS, Training, assert_pass, checks_of
from kit.compare import same
from kit.run import Run
from kit.saved import STEP, SavedRun
from preamp.optimizers import FusedAdam
from preamp.parallel import DistributedDataParallel

TWO = (
    "random_backward 0 first; random_backward 1 second; scheduled_step 0; scheduled_step 1; zero; "
)
THIS, RANKS = sys.modules[__name__], 2


def assert_resumes(level: str, storage: str, kind: str, wrap: str, folder: Path) -> None:
    """Save, load into another run that has trained too, and go on as if nothing had happened."""
    where = f"{level}, {storage}, {kind}, {wrap}"
    whole = Training(level, storage, kind, wrap)
    whole.train(3)
    whole.save(folder)
    losses = whole.train(3)
    resumed = Training(level, storage, kind, wrap, seed=1)
    resumed.train(1)
    resumed.state.extra = None
    resumed.load(folder)
    assert resumed.state.extra == whole.state.extra, where
    assert resumed.train(3) == losses, where
    assert (
        preamp.engine_of(resumed.optimizer).state_dict()
        == preamp.engine_of(whole.optimizer).state_dict()
    ), where
    for ours, wanted in zip(resumed.numbers(), whole.numbers(), strict=True):
        assert_same(ours, wanted, where)


def cases() -> list[tuple[str, str, str]]:
    """Levels with what they can store, and optimizers that can store it so."""
    found = combinations(("O0", "O1", "O2", "O5"), ("full", "split", "compact"), KINDS, size=2)
    return [
        (level, "full" if level in ("O0", "O1") or kind == "AdamW" else storage, kind)
        for level, storage, kind in found
    ]


def check_wrapped_models_resume_bitwise() -> None:
    for level, storage, kind in cases():
        for wrap in ("ddp", "fully_shard"):
            assert_resumes(level, storage, kind, wrap, _shared_folder())


def check_asynchronous_saves_hold_what_was() -> None:
    run = Training("O2", "split", "FusedAdam", "fully_shard")
    run.train(2)
    folder, before = _shared_folder(), run.numbers()
    group = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save({"run": run.state}, checkpoint_id=folder, process_group=group)
    run.train(2)
    saving.result()
    run.load(folder)
    for ours, wanted in zip(run.numbers(), before, strict=True):
        assert_same(ours, wanted, "asynchronous")


def check_an_error_on_one_rank_is_one_of_all() -> None:
    run = Training("O5", "full", "FusedAdam", "fully_shard")
    run.state.extra = object() if dist.get_rank() else None
    kind, told = (
        (TypeError, "data that")
        if dist.get_rank()
        else (preamp.PreampError, "Rank 1 of 2 failed with TypeError")
    )
    with pytest.raises(kind, match=told):
        run.state.state_dict()


def check_parts_in_plain_tensors_are_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = FusedAdam(model.parameters())
    more: Any = {"process_groups": dist.group.WORLD, "verbosity": 0}
    preamp.initialize(model, optimizer, opt_level="O2", **more)
    with pytest.raises(preamp.PreampStateError, match="a path for each rank"):
        preamp.RunState(model, optimizer)


def load_and_save_again(source: Path, target: Path, rank: int) -> None:
    """What one process saved, sharded over these ranks, and saved anew."""
    run = Training("O5", "split", "FusedAdam", "fully_shard", seed=rank)
    random_state = torch.get_rng_state()
    run.load(source)
    assert run.state.extra == {"rank": 0}
    # That of as many ranks is not there; torch makes none of its own either.
    assert_same(torch.get_rng_state(), random_state, "random state")
    run.save(target)


def _shared_folder() -> Path:
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    return Path(folders[0]) / "saved"


# -- a file for each rank -------------------------------------------------------------------------


class Replica(SavedRun):
    """A model of which each rank has a copy, its own buffers and random numbers."""

    def __init__(self, level: str, *, seed: int = 0) -> None:
        super().__init__(level, seed=seed)
        self.models = [DistributedDataParallel(model) for model in self.models]
        torch.manual_seed(dist.get_rank())


def path_of_rank(name: str) -> Path:
    return Path(os.environ["PREAMP_TEST_FOLDER"]) / f"{name}-rank{dist.get_rank()}.safetensors"


def own_each_rank_goes_on_from_its_own_file() -> None:
    for level in ("O1", "O2"):
        whole = Replica(level).play(STEP)
        whole.save(path_of_rank(level))
        whole.play(STEP)
        resumed = Replica(level, seed=1)
        resumed.load(path_of_rank(level))
        resumed.play(STEP)
        assert same(resumed.numbers(), whole.numbers())


def own_random_states_are_one_ranks() -> None:
    run = Replica("O2")
    path = path_of_rank("any").with_name("first.safetensors")
    if dist.get_rank() == 0:
        run.save(path)
    dist.barrier()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    run.load(path)
    assert torch.equal(torch.get_rng_state(), before) == (dist.get_rank() == 1)
    if dist.get_rank() == 1:
        text = "has the random states of rank 0 of 2, and rng=True asks for them on rank 1 of 2"
        with pytest.raises(ValueError, match=text):
            run.load(path, rng=True)


def own_parts_are_referred_to_run_state() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, sharded = nn.Linear(4, 4), nn.Linear(4, 4)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh))
    path = path_of_rank("parts")
    text = "got 'models/0/weight', of which each rank has a part.* Give it a preamp.RunState"
    with pytest.raises(preamp.PreampStateError, match=f"save_checkpoint {text}"):
        preamp.save_checkpoint(path, sharded)
    preamp.save_checkpoint(path, plain)
    with pytest.raises(preamp.PreampStateError, match=f"load_checkpoint {text}"):
        preamp.load_checkpoint(path, sharded)


# -- alone, and from one to several ----------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.distributed is (disabled|unavailable)",  # torch says so of each lone save
    "ignore:.*TypedStorage is deprecated",
)


@pytest.mark.more
def test_a_process_alone_resumes_bitwise(tmp_path: Path) -> None:
    for number, (level, storage, kind) in enumerate(cases()):
        assert_resumes(level, storage, kind, "", tmp_path / str(number))


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(THIS), RANKS, tmp_path)


def test_files_of_one_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREAMP_TEST_FOLDER", str(tmp_path))
    assert_pass(checks_of(THIS, "own_"), 2, tmp_path)


def test_from_one_rank_to_two_and_back(tmp_path: Path) -> None:
    run = Training("O5", "split", "FusedAdam")
    run.train(2)
    run.save(tmp_path / "one")
    folders = tmp_path / "one", tmp_path / "two"
    (tmp_path / "ranks").mkdir()
    run_ranks(functools.partial(load_and_save_again, *folders), tmp_path / "ranks")
    again = Training("O5", "split", "FusedAdam", seed=1)
    again.load(tmp_path / "two")
    for ours, wanted in zip(again.numbers(), run.numbers(), strict=True):
        assert_same(ours, wanted, "resharded")


def test_several_optimizers_and_schedulers(tmp_path: Path) -> None:
    def of(run: SavedRun) -> dict[str, preamp.RunState]:
        return {"run": preamp.RunState(nn.ModuleList(run.models), run.optimizers, run.schedulers)}

    one, other = (SavedRun("O2", "FusedAdam", "SGD", seed=s, num_losses=2) for s in (0, 1))
    dcp.save(of(one.play(TWO)), checkpoint_id=tmp_path / "saved")
    dcp.load(of(other), checkpoint_id=tmp_path / "saved")
    for run in (one, other):
        torch.manual_seed(2)
        random.seed(2)
        run.play(TWO)
    assert same(other.numbers(), one.numbers())


def initialized() -> tuple[nn.Module, FusedAdam]:
    run = Run("O2", "FusedAdam")
    return run.model, run.optimizer


def test_what_is_no_run_is_refused() -> None:
    model, optimizer = initialized()
    plain = nn.Linear(3, 3)
    with pytest.raises(preamp.PreampStateError, match="RunState got SGD without an engine"):
        preamp.RunState(plain, optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(preamp.PreampStateError, match="no optimizer without an engine"):
        preamp.RunState(model, [])
    with pytest.raises(TypeError, match=r"got a list as its model.*ModuleList"):
        preamp.RunState([model], optimizer)  # type: ignore[arg-type]


def test_a_state_within_a_step_is_refused() -> None:
    run = Run("O2", "FusedAdam")
    state = preamp.RunState(run.model, run.optimizer)
    with preamp.scale_loss(run.loss(), run.optimizer) as scaled_loss:
        with pytest.raises(preamp.PreampStateError, match=r"RunState.state_dict was called inside"):
            state.state_dict()
        scaled_loss.backward()
    text = r"RunState.state_dict was called between a backward and optimizer.step"
    with pytest.raises(preamp.PreampStateError, match=text):
        state.state_dict()
    run.step()
    state.state_dict()


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = initialized()
    state = preamp.RunState(model, optimizer, extra={"what": object()})
    with pytest.raises(TypeError, match=r"weights_only=True"):
        state.state_dict()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    preamp.RunState(model, optimizer, schedule)
    dcp.save({"run": preamp.RunState(model, optimizer)}, checkpoint_id=tmp_path / "saved")
    other = preamp.RunState(model, optimizer, schedule)
    with pytest.raises(Exception, match="has 0 schedulers, and the run has 1"):
        dcp.load({"run": other}, checkpoint_id=tmp_path / "saved")
