# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of wrappers that are made, used or left at other times than usual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from cases.tolerances import assert_same
from preamp.parallel import DistributedDataParallel

RANKS = 2
TORCH = nn.parallel.DistributedDataParallel


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, level: str) -> None:
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)


def backward(wrapped: Any, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    loss = wrapped(torch.randn(4, 8) + dist.get_rank()).float().square().mean() * factor
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def train(wrapped: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        backward(wrapped, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def assert_ranks_agree(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = [*preamp.master_params(optimizer), *model.parameters()]
    scale = torch.tensor([preamp.engine_of(optimizer).loss_scale()])
    mine = torch.cat([scale, *(param.detach().float().flatten() for param in own)])
    found = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(found, mine)
    assert_same(found[0], found[1])


def check_wrapping_comes_after_a_cast() -> None:
    """Casting a parameter takes the reducer's hooks off it: ranks would train alone."""
    for level in LEVEL_NAMES:
        model, optimizer = make()
        wrapped = TORCH(model)
        prepare(model, optimizer, level)
        if level in ("O2", "O3", "O5"):
            with pytest.raises(preamp.PreampStateError, match=r"before preamp\.initialize"):
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
            with pytest.raises(preamp.PreampStateError, match=r"before preamp\.initialize"):
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
    for level in ("O0", "O1", "O2", "O3"):
        model, optimizer = make()
        prepare(model, optimizer, level)
        wrapped = TORCH(model)
        train(wrapped, optimizer, steps=1)
        preamp.engine_of(optimizer).close()
        wrapped.eval()(torch.ones(1, 8))
        wrapped.train()
        if level in ("O2", "O3"):
            with pytest.raises(preamp.PreampStateError, match="Wrap the model again"):
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
    for level in ("O2", "O5"):
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
