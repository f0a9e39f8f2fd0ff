# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of training under preamp's wrapper: it equals one process with both batches.

Gradients are exact (see ``cases.models``), so equal means equal to the bit.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist

import preamp
from cases.levels import LEVEL_NAMES
from cases.selection import combinations
from cases.tolerances import assert_same
from distributed.torch_ddp_checks import RANKS, STEPS, sgd
from distributed.torch_ddp_checks import Run as WrappedRun
from preamp.parallel import DistributedDataParallel, Reducer
from preamp.parallel.LARC import LARC


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-4)


def larc(params: Any) -> LARC:
    return LARC(sgd(params))


class Run(WrappedRun):
    def __init__(self, level: str, build: Any = sgd, **wrapping: Any) -> None:
        super().__init__(level, build=build, wrap=DistributedDataParallel, **wrapping)


class ReducedRun(WrappedRun):
    """Reduces by hand."""

    def __init__(self, level: str) -> None:
        super().__init__(level, wrap=lambda model: model)
        self.reducer = Reducer(self.model)

    def reduce(self) -> None:
        self.reducer.reduce()


def _train(run: WrappedRun, backwards: int = 1, *, delay: bool = False) -> None:
    for step in range(STEPS):
        for part in range(backwards):
            run.backward(step * backwards + part, delay=delay and part < backwards - 1)
        run.step()
    run.check()


def check_plain_training() -> None:
    for level, build in combinations(LEVEL_NAMES, (sgd, adam, larc)):
        _train(Run(level, build))


def check_accumulation_with_a_reduction_each() -> None:
    for level in LEVEL_NAMES:
        _train(Run(level), 2)
        _train(Run(level), 2, delay=True)


def check_other_ways_to_reduce() -> None:
    ways = (
        {"delay_allreduce": True},
        {"message_size": 1},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0},
    )
    for level, way in combinations(("O1", "O2", "O3"), ways):
        _train(Run(level, **way))


def check_reducing_by_hand() -> None:
    for level in LEVEL_NAMES:
        _train(ReducedRun(level), 2)


def check_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for level in LEVEL_NAMES:
        run = Run(level)
        run.backward(0)
        run.step()
        before = copy.deepcopy(run.model.state_dict())
        run.backward(1, factor=float("inf") if dist.get_rank() == 1 else 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.plain_optimizer.zero_grad()
        assert run.engine.steps_skipped == 1
        for name, value in run.model.state_dict().items():
            assert_same(value, before[name], name)
        run.backward(2)
        run.step()
        run.check(steps=2)


def check_clipping_sees_the_same_norm_everywhere() -> None:
    for level in LEVEL_NAMES:
        run = Run(level)
        run.backward(0)
        norm = preamp.clip_grad_norm_(run.optimizer, 1e-3)
        both = [torch.empty_like(norm) for _ in range(RANKS)]
        dist.all_gather(both, norm)
        assert_same(both[0], both[1])
        run.engine.close()
