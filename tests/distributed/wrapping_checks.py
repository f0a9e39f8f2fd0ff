# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of wrappers that are made, used or left at other times than usual."""

import importlib
import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import preamp
from cases.levels import HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel

RANKS = 2
TORCH = nn.parallel.DistributedDataParallel


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare(model: Any, optimizer: Any, level: str, num_losses: int = 1) -> None:
    preamp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=num_losses, verbosity=0
    )


def backward(
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    factor: float = 1.0,
    loss_id: int = 0,
    **scaling: Any,
) -> None:
    loss = wrapped(torch.randn(4, 8) + dist.get_rank()).float().square().mean() * factor
    with preamp.scale_loss(loss, optimizer, loss_id, **scaling) as scaled:
        scaled.backward()


def overflow_on_rank_1(wrapped: Any, optimizer: torch.optim.Optimizer, **scaling: Any) -> None:
    with wrapped.no_sync():
        backward(wrapped, optimizer, 1.0 if dist.get_rank() == 0 else float("inf"), **scaling)


def train(wrapped: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        backward(wrapped, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def assert_ranks_agree(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = [*preamp.master_params(optimizer), *model.parameters()]
    engine = preamp.engine_of(optimizer)
    scales = [float(s.state_dict()[key]) for s in engine.scalers for key in s.state_dict()]
    mine = torch.cat([torch.tensor(scales), *(param.detach().float().flatten() for param in own)])
    found = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(found, mine)
    assert_same(found[0], found[1])


def check_wrapping_comes_after_a_cast() -> None:
    """Casting a parameter takes the reducer's hooks off it: ranks would train alone."""
    for level in LEVEL_NAMES:
        model, optimizer = make()
        wrapped = TORCH(model)
        prepare(model, optimizer, level)
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper before a cast", changes=True):
                wrapped(torch.ones(1, 8))
        else:
            train(wrapped, optimizer)
            assert_ranks_agree(model, optimizer)
        preamp.engine_of(optimizer).close()


def check_wrappers_inside_a_model_come_after_a_cast() -> None:
    for level in ("O1", "O2"):
        model: Any = nn.Sequential(TORCH(nn.Linear(8, 8)), TORCH(nn.Linear(8, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level == "O2":
            with refused("distributed", "wrappers inside a model", model, optimizer):
                prepare(model, optimizer, level)
            assert model[0].module.weight.dtype is torch.float32
        else:
            prepare(model, optimizer, level)
            train(model, optimizer)
            assert_ranks_agree(model, optimizer)
            preamp.engine_of(optimizer).close()


def check_a_delayed_reduction_may_be_made_before_a_cast() -> None:
    model, optimizer = make()
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    prepare(model, optimizer, "O2")
    train(wrapped, optimizer)
    assert_ranks_agree(model, optimizer)
    preamp.engine_of(optimizer).close()
    wrapped(torch.ones(1, 8))


def check_a_wrapper_ends_with_the_casts_it_was_made_for() -> None:
    for level in LEVEL_NAMES:
        model, optimizer = make()
        prepare(model, optimizer, level)
        wrapped = TORCH(model)
        train(wrapped, optimizer, steps=1)
        preamp.engine_of(optimizer).close()
        wrapped.eval()(torch.ones(1, 8))
        wrapped.train()
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper after close", changes=True):
                wrapped(torch.ones(1, 8))
            wrapped = TORCH(model)
        wrapped(torch.ones(1, 8) + dist.get_rank()).sum().backward()
        assert_same(*_both(model[1].weight.grad))


def _both(mine: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(found, mine)
    return found


def check_masters_are_made_equal_also_where_training_is_in_evaluation_mode() -> None:
    """As with batch norms and dropout that a fine-tuning leaves frozen."""
    for level in WITH_MASTERS:
        model, optimizer = make(seed=dist.get_rank())
        prepare(model, optimizer, level)
        wrapped = TORCH(model).eval()
        if dist.get_rank() == 0:
            wrapped(torch.ones(1, 8))
        torch.manual_seed(0)
        train(wrapped, optimizer)
        assert_ranks_agree(model, optimizer)
        preamp.engine_of(optimizer).close()


def check_masters_are_made_equal_without_blocks_too() -> None:
    model, optimizer = make(seed=dist.get_rank())
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    wrapped = TORCH(model).eval()
    torch.manual_seed(0)
    for _ in range(3):
        wrapped(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_ranks_agree(model, optimizer)
    preamp.engine_of(optimizer).close()


def check_an_overflow_that_is_dropped_before_the_reduction_leaves_no_trace() -> None:
    """Other ranks never hear of it, and keep the scale."""
    for level in LEVEL_NAMES:
        for overflows in (False, True):
            model, optimizer = make()
            prepare(model, optimizer, level)
            wrapped = TORCH(model)
            train(wrapped, optimizer, steps=1)
            scale = preamp.engine_of(optimizer).loss_scale()
            if overflows:
                overflow_on_rank_1(wrapped, optimizer)
            optimizer.zero_grad()
            train(wrapped, optimizer)
            assert_ranks_agree(model, optimizer)
            assert preamp.engine_of(optimizer).loss_scale() == scale
            preamp.engine_of(optimizer).close()


def check_an_overflow_of_one_loss_that_another_loss_reduces() -> None:
    """All losses that the reduction is of react, on every rank."""
    for level, delays in itertools.product(("O1", "O2"), (False, True)):
        model, optimizer = make()
        prepare(model, optimizer, level, num_losses=3)
        wrapped = TORCH(model)
        train(wrapped, optimizer, steps=1)
        overflow_on_rank_1(wrapped, optimizer, delay_unscale=delays)
        backward(wrapped, optimizer, loss_id=1)
        optimizer.step()
        optimizer.zero_grad()
        engine = preamp.engine_of(optimizer)
        assert engine.steps_skipped == 1
        for _ in range(2):
            backward(wrapped, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert_ranks_agree(model, optimizer)
        assert [engine.loss_scale(index) for index in range(3)] == [2.0**15, 2.0**15, 2.0**16]
        engine.close()


def check_an_overflow_that_another_optimizer_does_not_reduce() -> None:
    """One scale for two models, as Apex's default: it waits for the model that overflowed."""
    for level in ("O1", "O2"):
        (first, one), (second, two) = make(), make()
        prepare([first, second], [one, two], level)
        engine, wrapped, other = preamp.engine_of(one), TORCH(first), TORCH(second)
        overflow_on_rank_1(wrapped, one)
        train(other, two, steps=1)
        assert engine.loss_scale() == 2.0**16
        backward(wrapped, one)
        one.step()
        assert engine.loss_scale() == 2.0**15
        assert engine.steps_skipped == 1
        assert_ranks_agree(first, one)
        assert_ranks_agree(second, two)
        engine.close()


def check_ranks_that_step_alone_react_alone() -> None:
    for level in ("O1", "O2"):
        model, optimizer = make()
        prepare(model, optimizer, level)
        wrapped = TORCH(model)
        train(wrapped, optimizer, steps=1)
        overflow_on_rank_1(wrapped, optimizer)
        optimizer.step()
        engine, rank = preamp.engine_of(optimizer), dist.get_rank()
        assert (engine.steps_skipped, engine.loss_scale()) == (rank, 2.0 ** (16 - rank))
        engine.close()


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
