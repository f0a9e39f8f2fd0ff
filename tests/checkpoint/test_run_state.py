# SPDX-License-Identifier: BSD-3-Clause
"""``preamp.RunState``: runs in the files of ``torch.distributed.checkpoint``."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim

import preamp
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from checkpoint import run_state_checks
from checkpoint.run_state_checks import Training, assert_resumes, load_and_save_again
from distributed.ranks import assert_pass, checks_of
from preamp.optimizers import FusedAdam

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.distributed is (disabled|unavailable)",  # torch says so of each lone save
    "ignore:.*TypedStorage is deprecated",
)


@pytest.mark.more
def test_a_process_alone_resumes_bitwise(tmp_path: Path) -> None:
    for number, (level, storage, kind) in enumerate(run_state_checks.cases()):
        assert_resumes(level, storage, kind, "", tmp_path / str(number))


@pytest.mark.more
def test_on_two_ranks(tmp_path: Path) -> None:
    assert_pass(checks_of(run_state_checks), run_state_checks.RANKS, tmp_path)


def test_files_of_one_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREAMP_TEST_FOLDER", str(tmp_path))
    assert_pass(checks_of(run_state_checks, "own_"), 2, tmp_path)


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
