# SPDX-License-Identifier: BSD-3-Clause
"""Weights that several optimizers update, and gradients that only the model's side can drop."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from cases.models import Parts
from cases.tolerances import assert_same
from kit.loops import scaled_backward
from kit.refusals import refused
from kit.run import PLAIN, Run, assert_alike, build

levels = pytest.mark.parametrize("level", ["O0", "O1", "O4"])  # where weights stay float32
X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])


# -- weights that come to a second optimizer between a backward and a step ------------------------


class Sharing(Run):
    """An optimizer of a model and one of something else, which comes to have weights of both."""

    def __init__(self, level: str) -> None:
        super().__init__(level, model=Parts, count=2, loss_scale=128.0)

    def made(self, part: str, count: int = 1) -> None:
        """A backward of the first model, for so many of the optimizers."""
        loss = self.model(X, part).float().sum() / 8
        loss.backward() if self.row is None else scaled_backward(loss, self.optimizers[:count])

    def share(self) -> None:
        """Give the second optimizer the first layer's bias and the second one's weight."""
        given = [self.model.a.bias, self.model.b.weight]
        self.optimizers[1].add_param_group({"params": given})


@levels
@pytest.mark.parametrize("trained", [False, True])
def test_weights_shared_after_a_step(level: str, trained: bool) -> None:
    runs = [Sharing(level), Sharing(PLAIN)]
    for run in runs:
        if trained:
            run.made("ab")
            run.play("step; zero")
        run.share()
    for part in ("a", "ab"):
        for run in runs:
            run.made(part, 2)
            run.made("b", 2)
            run.play("step; zero")
        assert_alike(*runs)


@levels
def test_weights_are_not_shared_before_a_step(level: str) -> None:
    runs = run, plain = [Sharing(level), Sharing(PLAIN)]
    run.made("ab")
    with refused("engine", "weights shared before a step", changes=True):
        run.share()
    assert len(run.optimizers[1].param_groups) == 1
    plain.made("ab")
    for one in runs:
        one.step()
    assert_alike(*runs)


@levels
def test_weights_are_not_shared_in_a_block(level: str) -> None:
    run = Sharing(level)
    with preamp.scale_loss(run.model(X, "ab").float().sum(), run.optimizer) as scaled:
        scaled.backward()
        with pytest.raises(preamp.PreampStateError, match="add_param_group was called inside"):
            run.share()
        assert len(run.optimizers[1].param_groups) == 1


@levels
@pytest.mark.parametrize("losses", ["other loss", "other scale"])
def test_optimizers_that_share_weights_share_delayed_gradients(level: str, losses: str) -> None:
    model, plain = Parts(), Parts()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25)]
    preamp.initialize(model, optimizers, opt_level=level, num_losses=2, loss_scale=64, verbosity=0)
    scaled_backward(model(X).float().sum(), optimizers, delay_unscale=True)
    if losses == "other scale":
        preamp.engine_of(model).scaler(0).set_scale(32.0)
    loss_id = 1 if losses == "other loss" else 0
    scaled_backward(model(X).float().sum() * 2, optimizers, loss_id)
    with preamp.disable_casts():
        (plain(X).sum() * 3).backward()
    for optimizer in optimizers:
        for param, wanted in zip(preamp.master_params(optimizer), plain.parameters(), strict=True):
            assert_same(param.grad, wanted.grad)


# -- half weights, which one optimizer updates -----------------------------------------------------

half_levels = pytest.mark.parametrize("level", ["O2", "O3", "O5"])
SHARED = "engine", "a half weight in two optimizers"


@half_levels
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("allow_half_model", [False, True])
def test_a_half_weight_in_two_optimizers_is_refused(
    level: str, is_frozen: bool, allow_half_model: bool
) -> None:
    """Before anything is cast or hooked."""
    model = Parts()
    model.a.weight.requires_grad_(not is_frozen)
    ours = [build(name, model.parameters()) for name in ("SGD", "Adam")]
    before = copy.deepcopy(model.state_dict())
    options: Any = {"allow_half_model": allow_half_model, "verbosity": 0}
    with refused(*SHARED, model, *ours, weight="a.weight", second="an Adam"):
        preamp.initialize(model, ours, opt_level=level, **options)
    for name, value in model.state_dict().items():
        assert_same(value, before[name])
    preamp.initialize(model, ours, opt_level="O1", **options)


@half_levels
@pytest.mark.parametrize("as_masters", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_half_weight_that_is_to_join_a_second_optimizer_is_refused(
    level: str, as_masters: bool, is_frozen: bool
) -> None:
    """The step that was under way goes on, and so does the second optimizer."""
    run = Sharing(level)
    run.model.b.weight.requires_grad_(not is_frozen)
    run.made("ab")
    held: Any = run.optimizers[0].param_groups[0]["params"]
    weight = held[2] if as_masters else run.model.b.weight
    with refused(*SHARED, changes=True, weight="0.b.weight", second="an SGD"):
        run.optimizers[1].add_param_group({"params": [weight]})
    assert [len(one.param_groups) for one in run.optimizers] == [1, 1]
    run.optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for optimizer in run.optimizers:
        optimizer.step()
    assert run.engine.steps_applied == 2


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_half_weight_written_into_the_groups_of_a_second_optimizer_is_refused(level: str) -> None:
    """There is no call to refuse it in, so the next block does."""
    run = Sharing(level)
    run.optimizers[1].param_groups[0]["params"].append(run.model.b.weight)
    with refused(*SHARED, changes=True, weight="0.b.weight", second="an SGD"):
        run.made("ab", 2)
