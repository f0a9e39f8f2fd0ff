# SPDX-License-Identifier: BSD-3-Clause
"""What every rank checks about files of its own; run by ``test_run_state.py``."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

import preamp
from kit.compare import same
from kit.saved import STEP, SavedRun
from preamp.checkpoint import stop_on_signal
from preamp.parallel import DistributedDataParallel


class Replica(SavedRun):
    """A model of which each rank has a copy, its own buffers and random numbers."""

    def __init__(self, level: str, *, seed: int = 0) -> None:
        super().__init__(level, seed=seed)
        self.models = [DistributedDataParallel(model) for model in self.models]
        torch.manual_seed(dist.get_rank())


def path_of_rank(name: str) -> Path:
    return Path(os.environ["PREAMP_TEST_FOLDER"]) / f"{name}-rank{dist.get_rank()}.safetensors"


def check_each_rank_goes_on_from_its_own_file() -> None:
    for level in ("O1", "O2"):
        whole = Replica(level).play(STEP)
        whole.save(path_of_rank(level))
        whole.play(STEP)
        resumed = Replica(level, seed=1)
        resumed.load(path_of_rank(level))
        resumed.play(STEP)
        assert same(resumed.numbers(), whole.numbers())


def check_random_states_are_one_ranks() -> None:
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


def check_parts_are_referred_to_run_state() -> None:
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


def check_a_signal_to_one_rank_stops_all() -> None:
    with stop_on_signal() as stop:
        assert not stop.requested
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(SystemExit) as exit_:
            stop.exit()
    assert exit_.value.code == 143
