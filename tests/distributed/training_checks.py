# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of training in mixed precision: it equals one process with both batches.

Gradients are exact (see ``cases.models``), so equal means equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import preamp
from cases.levels import BY_NAME, LEVEL_NAMES
from cases.models import Exact, batch, values
from cases.selection import combinations
from cases.tolerances import assert_same
from preamp.parallel import DistributedDataParallel, Reducer
from preamp.parallel.LARC import LARC

RANKS = 2
STEPS = 3

Build = Callable[[Any], Any]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-4)


def larc(params: Any) -> LARC:
    return LARC(sgd(params))


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    x, coefficients = batch(index)
    return (model(x).float() * coefficients).sum()


class Run:
    """One model trained by both ranks, and by each of them alone with the batches of both."""

    def __init__(self, level: str, build: Build, **wrapping: Any) -> None:
        row = BY_NAME[level]
        self.model = Exact(seed=dist.get_rank())  # rank 0 has the weights that count
        self.plain = Exact(seed=0).to(torch.float32 if row.has_masters else row.weight)
        self.optimizer = build(self.model.parameters())
        self.plain_optimizer = build(self.plain.parameters())
        preamp.initialize(
            self.model, self.optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
        )
        self.engine = preamp.engine_of(self.model)
        self.reducer = Reducer(self.model) if wrapping.pop("reducer", False) else None
        self.ddp = self.model if self.reducer else DistributedDataParallel(self.model, **wrapping)

    def backward(self, index: int, factor: float = 1.0, **scaling: Any) -> None:
        """A backward of both ranks, each on its own batch, and of the plain model on both."""
        mine = RANKS * index + dist.get_rank()
        with preamp.scale_loss(loss_of(self.ddp, mine) * factor, self.optimizer, **scaling) as s:
            s.backward()
            if self.reducer is not None:
                self.reducer.reduce()
        dtype = next(self.plain.parameters()).dtype
        with preamp.disable_casts():
            for rank in range(RANKS):
                x, coefficients = batch(RANKS * index + rank)
                ((self.plain(x.to(dtype)).float() * coefficients).sum() / RANKS).backward()

    def step(self) -> None:
        self.optimizer.step()
        with preamp.disable_casts():
            self.plain_optimizer.step()
        self.zero()

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def check(self) -> None:
        ours = list(preamp.master_params(self.optimizer))
        for param, wanted in zip(ours, values(self.plain_optimizer), strict=True):
            assert_same(param.detach(), wanted)
        weights = torch.cat([param.detach().float().flatten() for param in ours])
        everywhere = [torch.empty_like(weights) for _ in range(RANKS)]
        dist.all_gather(everywhere, weights)
        assert_same(everywhere[0], everywhere[1])
        self.engine.close()


def _train(level: str, build: Build, backwards: int, wrapping: Any, **scaling: Any) -> None:
    run = Run(level, build, **wrapping)
    for step in range(STEPS):
        for part in range(backwards):
            delayed = scaling if part < backwards - 1 else {}
            run.backward(step * backwards + part, **delayed)
        run.step()
    run.check()
    assert run.engine.steps_applied == STEPS


@pytest.mark.apex("9.1 training at every level on two ranks")
def check_plain_training() -> None:
    for level, build in combinations(LEVEL_NAMES, (sgd, adam, larc)):
        _train(level, build, 1, {})


@pytest.mark.apex("9.1 training at every level on two ranks")
def check_accumulation_with_a_reduction_each() -> None:
    for level in LEVEL_NAMES:
        _train(level, sgd, 2, {})
        _train(level, sgd, 2, {}, delay_unscale=True)


def check_other_ways_to_reduce() -> None:
    ways = (
        {"delay_allreduce": True},
        {"message_size": 1},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0},
    )
    for level, way in combinations(("O1", "O2", "O3"), ways):
        _train(level, sgd, 1, way)


@pytest.mark.apex("B 7: gradients reduced inside the block")
def check_reducing_by_hand() -> None:
    for level in LEVEL_NAMES:
        _train(level, sgd, 2, {"reducer": True})


@pytest.mark.apex("9.1 training at every level on two ranks")
def check_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, sgd)
        run.backward(0)
        run.step()
        before = copy.deepcopy(run.model.state_dict())
        run.backward(1, factor=float("inf") if dist.get_rank() == 1 else 1.0)
        run.optimizer.step()
        run.zero()
        assert run.engine.steps_skipped == 1
        for name, value in run.model.state_dict().items():
            assert_same(value, before[name], name)
        run.backward(2)
        run.step()
        run.check()


def check_clipping_sees_the_same_norm_everywhere() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, sgd)
        run.backward(0)
        norm = preamp.clip_grad_norm_(run.optimizer, 1e-3)
        both = [torch.empty_like(norm) for _ in range(RANKS)]
        dist.all_gather(both, norm)
        assert_same(both[0], both[1])
        run.engine.close()
