# SPDX-License-Identifier: BSD-3-Clause
"""What ranks check of an optimizer that they share: the run is the unshared one, to the bit."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.levels import F32_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from cases.models import Damage
from cases.selection import combinations
from cases.tolerances import assert_same
from preamp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD
from preamp.parallel import LARC, full_state_dicts, shard_optimizer

Build = Callable[[Any], Any]

BUILDS: dict[str, Build] = {
    "sgd": functools.partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(optim.AdamW, lr=0.05, fused=True),
    "adamw foreach": functools.partial(optim.AdamW, lr=0.05, foreach=True, amsgrad=True),
    "adagrad": functools.partial(optim.Adagrad, lr=0.1),
    "nadam": functools.partial(optim.NAdam, lr=0.01),
    "FusedAdam": functools.partial(FusedAdam, lr=0.05),
    "FusedSGD": functools.partial(FusedSGD, lr=0.1, momentum=0.9),
    "FusedAdagrad": functools.partial(FusedAdagrad, lr=0.1),
}


class Model(nn.Module):
    """Sizes that no number of ranks divides, single elements, and strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(2).mean(2))


class Run:
    def __init__(self, level: str, build: Build, *, shared: bool, scale: Any = "dynamic") -> None:
        self.model = Model()
        self.optimizer = build(self.model.parameters())
        preamp.initialize(
            self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0
        )
        self.engine = preamp.engine_of(self.model)
        self.engine.scaler(0).set_scale(256.0)
        self.ddp = DistributedDataParallel(self.model)
        if shared:
            shard_optimizer(self.optimizer)
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def backward(self, index: int, factor: float = 1.0) -> None:
        x = torch.randn(
            4, 3, 5, 5, generator=torch.Generator().manual_seed(10 * index + dist.get_rank())
        )
        loss = self.ddp(x).float().square().mean() * factor
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self, index: int, *, set_to_none: bool = True) -> None:
        for part in range(3):  # alone, alone and reduced
            with self.ddp.no_sync() if part < 2 else nullcontext():
                self.backward(3 * index + part)
        preamp.clip_grad_norm_(self.optimizer, 0.05 if index else math.inf)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def overflow(self) -> None:
        if dist.get_rank() == 0:
            Damage(self.model.head.weight, math.inf).armed = True
        self.backward(99)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 3, first: int = 0) -> None:
        for index in range(first, first + steps):
            self.step(index, set_to_none=index % 2 == 0)


def _assert_same_weights(runs: tuple[Run, Run], where: str) -> None:
    for (name, ours), wanted in zip(
        runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True
    ):
        assert_same(ours.detach(), wanted.detach(), f"{where}: {name}")


def _close(*runs: Run) -> None:
    for run in runs:
        run.engine.close()


def check_a_shared_run_is_the_unshared_one() -> None:
    _compare(("O1", "O2"), BUILDS)
    _compare(("O0", "O3", "O4", "O5"), {name: BUILDS[name] for name in ("adamw", "FusedSGD")})


def three_ranks() -> None:
    _compare(("O1", "O2", "O5"), {name: BUILDS[name] for name in ("adamw", "FusedAdam")})


def _compare(levels: Iterable[str], builds: Mapping[str, Build]) -> None:
    for level, (name, build) in combinations(levels, builds.items()):
        runs = Run(level, build, shared=True), Run(level, build, shared=False)
        for run in runs:
            run.train()
            run.overflow()
            run.train(1, first=3)
        where = f"{level}, {name}"
        _assert_same_weights(runs, where)
        counts = [(run.engine.steps_applied, run.engine.steps_skipped) for run in runs]
        assert counts[0] == counts[1], where
        assert level == "O3" or counts[0] == (4, 1), where  # Adam in float16 alone overflows
        assert runs[0].engine.loss_scale() == runs[1].engine.loss_scale() < 256.0
        _close(*runs)  # masters are put together: float32 weights are equal, too
        _assert_same_weights(runs, where)


def check_bytes_are_as_estimated() -> None:
    for level, name in combinations(LEVEL_NAMES, ("sgd", "adamw", "FusedAdam")):
        run = Run(level, BUILDS[name], shared=True)
        run.train(2)
        run.backward(7)
        found = preamp.count_memory(run.engine)
        wanted = preamp.estimate(
            model := Model(),
            level,
            BUILDS[name](model.parameters()),
            world_size=dist.get_world_size(),
            sharding="zero1",
        ).categories
        for category, size in wanted.items():
            if dist.get_rank() == 0:
                assert found[category] == size, (level, name, category)
            else:
                assert found[category] <= size, (level, name, category)
        _close(run)


def check_whole_states_leave_and_come_back() -> None:
    for level, name in combinations(("O1", "O2", "O5"), ("adamw", "sgd", "FusedAdam")):
        runs = Run(level, BUILDS[name], shared=True), Run(level, BUILDS[name], shared=False)
        for run in runs:
            run.train()
        found = full_state_dicts(runs[0].model, runs[0].optimizer)
        assert (found is None) == (dist.get_rank() > 0)
        holder = [found]
        dist.broadcast_object_list(holder, 0)
        assert holder[0] is not None
        weights, state = holder[0]
        for key, _ in runs[1].model.named_parameters():  # buffers are each rank's own
            assert_same(weights[key], runs[1].model.state_dict()[key], key)
        wanted = runs[1].optimizer.state_dict()
        for number, entry in wanted["state"].items():
            for key, value in entry.items():
                assert_same(state["state"][number][key], value, f"{level}, {name}, {key}")
        # Into a shared run, and into one that is not.
        later = Run(level, BUILDS[name], shared=True), Run(level, BUILDS[name], shared=False)
        for run in later:
            run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(copy.deepcopy(state))
            run.engine.load_state_dict(runs[0].engine.state_dict())
            run.scheduler.load_state_dict(runs[0].scheduler.state_dict())
        for run in (*runs, *later):
            run.train(2, first=3)
        for run in (runs[0], *later):
            _assert_same_weights((run, runs[1]), f"{level}, {name}")
        _close(*runs, *later)


def check_weights_written_by_the_script_stay() -> None:
    for level in ("O1", "O2", "O5"):
        runs = Run(level, BUILDS["sgd"], shared=True), Run(level, BUILDS["sgd"], shared=False)
        for run in runs:
            run.train(1)
            with torch.no_grad():
                run.model.conv.weight.clamp_(-0.05, 0.05)
            run.train(1, first=1)
        _assert_same_weights(runs, level)
        _close(*runs)


def check_groups_that_are_added_later() -> None:
    runs = Run("O2", BUILDS["sgd"], shared=True), Run("O2", BUILDS["sgd"], shared=False)
    for run, is_shared in zip(runs, (True, False), strict=True):
        late = nn.Parameter(torch.linspace(-1.0, 1.0, 9))
        run.optimizer.add_param_group({"params": [late]})
        if is_shared:
            shard_optimizer(run.optimizer)
        late.grad = torch.arange(9.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "optimizer.step.. was called with gradients that no")
            run.optimizer.step()
        run.model.late = late
    _assert_same_weights(runs, "a late group")
    _close(*runs)


def _refused(text: str, call: Callable[..., Any], *args: Any, **arguments: Any) -> None:
    with pytest.raises(preamp.PreampStateError, match=re.escape(text)):
        call(*args, **arguments)


def check_what_is_refused() -> None:
    run = Run("O2", BUILDS["sgd"], shared=True)
    run.backward(0)
    text = (
        "The gradient of the master of 'conv.weight' was read, of which this rank has a part. "
        "Between backward and step the whole gradient is that of the model's parameter; parts are "
        "the optimizer's. Clip with preamp.clip_grad_norm_(optimizer, max_norm), which knows the "
        "whole gradients' norm."
    )
    masters = list(preamp.master_params(run.optimizer))
    _refused(text, lambda: nn.utils.clip_grad_norm_(masters, 1.0))
    text = (
        "state_dict() was called on a model whose masters ranks share, 'conv.weight' for one. "
        "This rank does not know the float32 values of the others. Call "
        "preamp.parallel.full_state_dicts(model, optimizer) on every rank."
    )
    _refused(text, run.model.state_dict)
    text = (
        "optimizer.step was called with a closure while ranks share its work. During the step "
        "each rank has parts of the parameters, which no forward can run on. Call the backward "
        "before optimizer.step(), without a closure."
    )
    _refused(text, lambda: run.optimizer.step(lambda: None))
    run.optimizer.step()
    _close(run)
    for build, name in (
        (functools.partial(FusedLAMB, lr=0.1), "FusedLAMB"),
        (lambda params: LARC.LARC(optim.SGD(params, lr=0.1)), "LARC"),
        (functools.partial(optim.LBFGS, lr=0.1), "LBFGS"),
    ):
        _refused(
            f"{name} is not known to be elementwise. A rank has parts of the weights; LAMB, LARS,",
            Run,
            "O1",
            build,
            shared=True,
        )
    run = Run("O1", BUILDS["sgd"], shared=False)
    assert (full_state_dicts(run.model, run.optimizer) is None) == (dist.get_rank() > 0)
    _close(run)


def check_torchs_own_sharding() -> None:
    """It has an optimizer inside, which does not see masters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, which torch's own import calls
        kind: Any = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer

    def build(params: Any) -> Any:
        return kind(params, optim.SGD, lr=0.1)

    text = (
        "A ZeroRedundancyOptimizer was given at a level with master weights. Its inner optimizer "
        "would update the half weights themselves, by scaled gradients. Initialize the optimizer "
        "that it would make, and then call preamp.parallel.shard_optimizer(optimizer)."
    )
    for level in WITH_MASTERS:
        _refused(text, Run, level, build, shared=False)
    for level in F32_WEIGHTS:
        wanted = functools.partial(optim.SGD, lr=0.1)
        runs = Run(level, build, shared=False), Run(level, wanted, shared=False)
        for run in runs:
            run.train()
        _assert_same_weights(runs, level)
        _close(*runs)


def check_a_failing_step_leaves_whole_parameters() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for level in ("O1", "O2"):
        run = Run(level, BUILDS["sgd"], shared=True)
        shapes = [param.shape for param in run.model.parameters()]
        run.backward(0)
        handle = run.optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step()
        handle.remove()
        assert [param.shape for param in run.model.parameters()] == shapes
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(1)
        _close(run)
