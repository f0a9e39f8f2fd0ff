# SPDX-License-Identifier: BSD-3-Clause
"""What scripts see and do between ``scale_loss`` and ``step``: master gradients and clipping."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from cases.models import batch, values
from cases.tolerances import assert_same
from kit.pair import Pair

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


def plain_params(pair: Pair) -> list[torch.Tensor]:
    return [p for group in pair.plain_optimizer.param_groups for p in group["params"]]


def masters(pair: Pair) -> list[Any]:
    return list(preamp.master_params(pair.optimizer))


# -- lazy master gradients -------------------------------------------------------------------


@with_masters
def test_master_gradients_are_made_when_read(level: str) -> None:
    pair = Pair(level)
    pair.backward(0)
    assert not any(master.has_materialized_grad for master in masters(pair))
    first = masters(pair)[0]
    assert_same(first.grad, plain_params(pair)[0].grad)
    assert [master.has_materialized_grad for master in masters(pair)] == [True] * 4
    pair.step()
    assert not any(master.has_materialized_grad for master in masters(pair))
    assert all(master.grad is None for master in masters(pair))
    pair.check()


@with_masters
def test_master_gradient_is_not_there_inside_the_body(level: str) -> None:
    """It would be scaled and incomplete; what came before is there."""
    pair = Pair(level)
    pair.backward(0)
    earlier = [p.grad.clone() for p in plain_params(pair) if p.grad is not None]
    with preamp.scale_loss(pair.loss(1), pair.optimizer) as scaled:
        scaled.backward()
        for master, was in zip(masters(pair), earlier, strict=True):
            assert_same(master.grad, was)
    pair.theirs(1)
    pair.check_grads()


@with_masters
def test_assigning_a_master_gradient_replaces_it(level: str) -> None:
    pair = Pair(level)
    pair.backward(0)
    for master, plain in zip(masters(pair), plain_params(pair), strict=True):
        for param in (master, plain):
            param.grad = torch.full_like(param, 0.125)
    pair.check_grads()
    pair.backward(1)  # adds to it
    pair.check_grads()
    pair.step()
    pair.check()


REWRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda half: half.grad.mul_(2),
    "by another": lambda half: setattr(half, "grad", half.grad * 2),
}


@with_masters
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("read", [False, True])
def test_without_a_loss_scale_half_gradients_may_be_rewritten(
    level: str, read: bool, rewrite: str
) -> None:
    pair = Pair(level, loss_scale=1.0)
    pair.backward(0)
    if read:
        pair.check_grads()
    for half, plain in zip(pair.model.parameters(), plain_params(pair), strict=True):
        REWRITES[rewrite](half)
        REWRITES[rewrite](plain)
    pair.check_grads()
    pair.step()
    pair.check()


@with_masters
def test_a_plain_backward_over_a_dropped_scaled_one_is_refused(level: str) -> None:
    pair = Pair(level, loss_scale=128.0)
    pair.backward(0)
    pair.model.zero_grad()
    pair.loss(1).backward()
    with pytest.raises(preamp.PreampStateError, match="call every backward inside scale_loss"):
        pair.optimizer.step()


@with_masters
def test_half_gradients_keep_the_scale(level: str) -> None:
    pair = Pair(level, loss_scale=64.0)
    pair.backward(0)
    for half, plain in zip(pair.model.parameters(), plain_params(pair), strict=True):
        assert plain.grad is not None
        assert_same(half.grad, (plain.grad * 64).to(half.dtype))


@with_masters
def test_masters_are_parameters_like_others(level: str) -> None:
    pair = Pair(level)
    pair.backward(0)
    for master in masters(pair):
        assert isinstance(master, nn.Parameter)
        assert master.is_leaf
        assert master.requires_grad
        twin = pickle.loads(pickle.dumps(master))
        assert type(twin) is nn.Parameter
        assert_same(twin.detach(), master.detach())
        assert_same(copy.deepcopy(master).detach(), master.detach())


@levels
def test_master_params_without_initialize(level: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert [id(p) for p in preamp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wanted = torch.float16 if level == "O3" else torch.float32
    assert [p.dtype for p in preamp.master_params(optimizer)] == [wanted] * 2


# -- clipping --------------------------------------------------------------------------------


@with_masters
def test_clipping_makes_no_master_gradients(level: str) -> None:
    pair = Pair(level)
    pair.backward(0)
    half_before = [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
    preamp.clip_grad_norm_(pair.optimizer, 0.01)
    assert not any(master.has_materialized_grad for master in masters(pair))
    for param, was in zip(pair.model.parameters(), half_before, strict=True):
        assert_same(param.grad, was)


@levels
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("by", ["preamp", "torch"])
def test_clipping_an_overflow_gives_its_norm_and_skips(
    level: str, norm_type: float, by: str
) -> None:
    pair = Pair(level, loss_scale="dynamic")
    before = values(pair.optimizer)
    pair.overflow()
    if by == "preamp":
        norm = preamp.clip_grad_norm_(pair.optimizer, 1.0, norm_type)
    else:
        norm = torch.nn.utils.clip_grad_norm_(masters(pair), 1.0, norm_type)
    assert not torch.isfinite(norm)
    pair.optimizer.step()
    assert pair.engine.last_step_skipped
    for now, was in zip(values(pair.optimizer), before, strict=True):
        assert_same(now, was)
    pair.zero()
    pair.train(1)
    pair.check()


@levels
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_without_gradients(level: str, norm_type: float) -> None:
    pair = Pair(level)
    assert preamp.clip_grad_norm_(pair.optimizer, 1.0, norm_type).item() == 0.0
    pair.step()
    pair.check()


@levels
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_counts_all_dtypes(level: str, norm_type: float) -> None:
    extra = nn.Parameter(torch.tensor([0.0], dtype=torch.float64))
    pair = Pair(level)
    pair.optimizer.add_param_group({"params": [extra]})
    x, coefficients = batch(0)
    loss = (pair.model(x) * coefficients).sum().double() + extra.sum() * 3
    with preamp.scale_loss(loss, pair.optimizer) as scaled:
        scaled.backward()
    norm = preamp.clip_grad_norm_(pair.optimizer, 1.5, norm_type)
    assert norm.item() == pytest.approx(3.0, rel=1e-3)
    assert extra.grad is not None
    assert extra.grad.dtype is torch.float64
    assert extra.grad.item() == pytest.approx(1.5, rel=1e-3)
