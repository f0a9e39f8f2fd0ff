# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of wrappers that are made, used or left at other times than usual."""

import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import preamp
from cases.levels import HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from distributed.ranks import assert_equal_everywhere, each
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel

TORCH = nn.parallel.DistributedDataParallel


class Run:
    """A model in torch's wrapper; ``wraps`` says whether that is made before, after or not."""

    def __init__(
        self, level: str, *, seed: int = 0, wraps: str = "after", losses: int = 1, **more: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = more.pop("model", None) or nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.wrap = more.pop("wrap", TORCH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wrapped: Any = self.wrap(self.model) if wraps == "before" else self.model
        if wraps != "with others":
            options: dict[str, Any] = {"loss_scale": "dynamic", "num_losses": losses, **more}
            preamp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)
        if wraps == "after":
            self.wrapped = self.wrap(self.model)

    @property
    def engine(self) -> Any:
        return preamp.engine_of(self.optimizer)

    def backward(self, factor: float = 1.0, loss_id: int = 0, **scaling: Any) -> None:
        x = torch.randn(4, 8) + dist.get_rank()
        loss = self.wrapped(x).float().square().mean() * factor
        with preamp.scale_loss(loss, self.optimizer, loss_id, **scaling) as scaled:
            scaled.backward()

    def overflow(self, **scaling: Any) -> None:
        """On the second rank, unreduced."""
        with self.wrapped.no_sync():
            self.backward(1.0 if dist.get_rank() == 0 else float("inf"), **scaling)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def agree(self) -> None:
        states = [scaler.state_dict() for scaler in self.engine.scalers]
        scales = torch.tensor([float(state[key]) for state in states for key in state])
        own = [*preamp.master_params(self.optimizer), *self.model.parameters()]
        assert_equal_everywhere(scales, *own)


def check_wrapping_comes_after_a_cast() -> None:
    """Casting a parameter takes the reducer's hooks off it: ranks would train alone."""
    for level in each(LEVEL_NAMES):
        run = Run(level, wraps="before")
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper before a cast", changes=True):
                run.wrapped(torch.ones(1, 8))
        else:
            run.train()
            run.agree()


def check_wrappers_inside_a_model_come_after_a_cast() -> None:
    for level in each(("O1", "O2")):
        model: Any = nn.Sequential(TORCH(nn.Linear(8, 8)), TORCH(nn.Linear(8, 4)))
        if level == "O2":
            with refused("distributed", "wrappers inside a model", model):
                Run(level, model=model, wraps="never")
            assert model[0].module.weight.dtype is torch.float32
        else:
            run = Run(level, model=model, wraps="never")
            run.train()
            run.agree()


def check_a_delayed_reduction_may_be_made_before_a_cast() -> None:
    run = Run("O2", wraps="before", wrap=lambda m: DistributedDataParallel(m, delay_allreduce=True))
    run.train()
    run.agree()
    run.engine.close()
    run.wrapped(torch.ones(1, 8))


def check_a_wrapper_ends_with_the_casts_it_was_made_for() -> None:
    for level in each(LEVEL_NAMES):
        run = Run(level)
        run.train(steps=1)
        run.engine.close()
        run.wrapped.eval()(torch.ones(1, 8))
        run.wrapped.train()
        wrapped = run.wrapped
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper after close", changes=True):
                wrapped(torch.ones(1, 8))
            wrapped = TORCH(run.model)
        wrapped(torch.ones(1, 8) + dist.get_rank()).sum().backward()
        assert_equal_everywhere(run.model[1].weight.grad)


def check_masters_are_made_equal_also_where_training_is_in_evaluation_mode() -> None:
    """As with batch norms and dropout that a fine-tuning leaves frozen."""
    for level in each(WITH_MASTERS):
        run = Run(level, seed=dist.get_rank())
        run.wrapped.eval()
        if dist.get_rank() == 0:
            run.wrapped(torch.ones(1, 8))
        torch.manual_seed(0)
        run.train()
        run.agree()


def check_masters_are_made_equal_without_blocks_too() -> None:
    run = Run("O5", seed=dist.get_rank(), loss_scale=1.0)
    run.wrapped.eval()
    torch.manual_seed(0)
    for _ in range(3):
        run.wrapped(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
        run.step()
    run.agree()


def check_an_overflow_that_is_dropped_before_the_reduction_leaves_no_trace() -> None:
    """Other ranks never hear of it, and keep the scale."""
    for level in each(LEVEL_NAMES):
        run = Run(level)
        run.train(steps=1)
        scale = run.engine.loss_scale()
        for overflows in (False, True):
            if overflows:
                run.overflow()
            run.optimizer.zero_grad()
            run.train()
            run.agree()
            assert run.engine.loss_scale() == scale


def check_an_overflow_of_one_loss_that_another_loss_reduces() -> None:
    """All losses that the reduction is of react, on every rank."""
    for level, delays in each(("O1", "O2"), (False, True), size=2):
        run = Run(level, losses=3)
        run.train(steps=1)
        run.overflow(delay_unscale=delays)
        run.backward(loss_id=1)
        run.step()
        assert run.engine.steps_skipped == 1
        run.train(steps=2)
        run.agree()
        scales = [run.engine.loss_scale(index) for index in range(3)]
        assert scales == [2.0**15, 2.0**15, 2.0**16]


def check_an_overflow_that_another_optimizer_does_not_reduce() -> None:
    """One scale for two models, as Apex's default: it waits for the model that overflowed."""
    for level in each(("O1", "O2")):
        one, other = (Run(level, wraps="with others") for _ in range(2))
        preamp.initialize(
            [one.model, other.model],
            [one.optimizer, other.optimizer],
            opt_level=level,
            loss_scale="dynamic",
            verbosity=0,
        )
        for run in (one, other):
            run.wrapped = TORCH(run.model)
        one.overflow()
        other.train(steps=1)
        assert one.engine.loss_scale() == 2.0**16
        one.backward()
        one.step()
        assert one.engine.loss_scale() == 2.0**15
        assert one.engine.steps_skipped == 1
        one.agree()
        other.agree()


def check_ranks_that_step_alone_react_alone() -> None:
    for level in each(("O1", "O2")):
        run = Run(level)
        run.train(steps=1)
        run.overflow()
        run.optimizer.step()
        rank = dist.get_rank()
        assert (run.engine.steps_skipped, run.engine.loss_scale()) == (rank, 2.0 ** (16 - rank))


def check_torchs_own_sharding() -> None:
    """It has an optimizer inside, which does not see masters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, which torch's own import calls
        kind: Any = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    for level in WITH_MASTERS:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), optim.SGD, lr=0.1)
        with refused("distributed", "ZeroRedundancyOptimizer", model):
            preamp.initialize(model, optimizer, opt_level=level)
