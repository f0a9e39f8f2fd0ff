# SPDX-License-Identifier: BSD-3-Clause
"""Runs in the files of ``torch.distributed.checkpoint``, alone and on ranks: ``preamp.RunState``.

What begins with ``check_`` runs on ranks, and with ``own_`` is of files that each has for itself.
"""

import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import preamp
from cases.ranks import run_ranks
from cases.selection import combinations
from cases.tolerances import assert_same
from distributed.ranks import assert_pass, checks_of
from kit.compare import same
from kit.saved import STEP, SavedRun
from preamp.optimizers import FusedAdam, FusedSGD
from preamp.parallel import DistributedDataParallel

THIS, RANKS = sys.modules[__name__], 2
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.01, momentum=0.5),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
}


class Training:
    """A model with dropout, its optimizer and a schedule; clips each step."""

    def __init__(self, level: str, storage: str, kind: str, wrap: str = "", seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.25), nn.Linear(16, 5)
        self.model: Any = nn.Sequential(*layers)
        if wrap == "fully_shard":
            fully_shard(self.model[0])
            fully_shard(self.model)
        params = list(self.model.parameters())
        groups: Any = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]
        self.optimizer = KINDS[kind](groups)
        more: Any = {"storage": storage, "verbosity": 0, "backend": "reference"}
        preamp.initialize(self.model, self.optimizer, opt_level=level, **more)
        if wrap == "ddp":
            self.model = TorchDDP(self.model)
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + 10 * rank)
        random.seed(seed + 10 * rank)
        self.state = preamp.RunState(self.model, self.optimizer, self.scheduler, {"rank": rank})

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, 8) + random.random()).float().square().mean()
            with preamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(self.optimizer, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        dcp.save({"run": self.state}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp.load({"run": self.state}, checkpoint_id=folder)

    def numbers(self) -> list[torch.Tensor]:
        """Weights in float32, half weights and the optimizer's state, whole."""
        entries = self.optimizer.state_dict()["state"].values()
        values = [value for entry in entries for value in entry.values()]
        values = [*self.model.state_dict().values(), *self.model.parameters(), *values]
        tensors = [value.detach() for value in values if isinstance(value, torch.Tensor)]
        return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]


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
    def start(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        models = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        optimizers = [FusedAdam(models[0].parameters()), optim.SGD(models[1].parameters(), lr=0.1)]
        preamp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0)
        schedulers = [optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
        return models, optimizers, schedulers

    def train(models: Any, optimizers: Any, schedulers: Any) -> None:
        for number, model in enumerate(models):
            with preamp.scale_loss(
                model(torch.ones(2, 4)).sum(), optimizers[number], number
            ) as loss:
                loss.backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
            schedulers[number].step()

    one, other = start(0), start(1)
    train(*one)
    dcp.save({"run": preamp.RunState(*one)}, checkpoint_id=tmp_path / "saved")
    dcp.load({"run": preamp.RunState(*other)}, checkpoint_id=tmp_path / "saved")
    for run in (one, other):
        train(*run)
    assert preamp.engine_of(other[0]).state_dict() == preamp.engine_of(one[0]).state_dict()
    assert other[2][1].state_dict() == one[2][1].state_dict()
    for ours, wanted in zip(other[0].parameters(), one[0].parameters(), strict=True):
        assert_same(ours, wanted, "weights")


def initialized() -> tuple[nn.Module, FusedAdam]:
    model = nn.Linear(3, 3)
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    return model, optimizer


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
    model, optimizer = initialized()
    state = preamp.RunState(model, optimizer)
    with preamp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled_loss:
        with pytest.raises(preamp.PreampStateError, match=r"RunState.state_dict was called inside"):
            state.state_dict()
        scaled_loss.backward()
    text = r"RunState.state_dict was called between a backward and optimizer.step"
    with pytest.raises(preamp.PreampStateError, match=text):
        state.state_dict()
    optimizer.step()
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
