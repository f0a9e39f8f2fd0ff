# SPDX-License-Identifier: BSD-3-Clause
"""Weights that several optimizers update, and gradients that only the model's side can drop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import EXACT, WITH_MASTERS
from cases.models import Damage, Parts
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from kit.pair import Build, sgd

levels = pytest.mark.parametrize("level", EXACT)
X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Both update the whole model, with different rules."""
    params = list(model.parameters())
    return [
        torch.optim.SGD(params, lr=0.5, momentum=0.9),
        torch.optim.Adam(params, lr=0.05, eps=1e-4),
    ]


@levels
def test_two_optimizers_of_one_model_see_one_gradient(level: str) -> None:
    """As in plain torch: each step uses the gradient, and zeroing by either ends it."""
    model = Parts()
    plain = copy.deepcopy(model)
    ours, theirs = two_optimizers(model), two_optimizers(plain)
    preamp.initialize(model, ours, opt_level=level, loss_scale=128.0, verbosity=0)
    for step in range(4):
        for part in "ab" if step % 2 else "ba":
            loss = model(X, part).float().sum() / 8
            with preamp.scale_loss(loss, ours) as scaled:
                scaled.backward()
            (plain(X, part).sum() / 8).backward()
        for optimizer, other in zip(ours, theirs, strict=True):
            optimizer.step()
            with preamp.disable_casts():
                other.step()
        ours[step % 2].zero_grad()
        theirs[0].zero_grad()
        for mine, wanted in zip(preamp.master_params(ours[0]), plain.parameters(), strict=True):
            assert_same(mine.detach(), wanted.detach(), f"step {step}")
    engine = preamp.engine_of(model)
    firsts, seconds = map(preamp.master_params, ours)
    assert all(a is b for a, b in zip(firsts, seconds, strict=True))
    engine.close()
    for optimizer in ours:
        own = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
        assert all(param in optimizer.state for param in model.parameters())


@levels
def test_an_exception_restores_a_shared_gradient_once(level: str) -> None:
    model = Parts()
    ours = two_optimizers(model)
    preamp.initialize(model, ours, opt_level=level, loss_scale=128.0, verbosity=0)
    with preamp.scale_loss(model(X).float().sum() / 8, ours) as scaled:
        scaled.backward()
    before = [param.grad.clone() for param in preamp.master_params(ours[0])]

    def fail() -> None:
        with preamp.scale_loss(model(X).float().sum(), ours) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for param, grad in zip(preamp.master_params(ours[0]), before, strict=True):
        assert_same(param.grad, grad)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_the_cause_and_the_scale_are_those_of_the_loss_that_overflowed(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss 0 is clean, loss 1 overflows: its scaler is halved, told of and checked for limits."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
    )
    engine = preamp.engine_of(model)
    engine.verbosity = 1
    engine.scaler(0).set_scale(4.0)
    engine.scaler(1).set_scale(2.0**-23)
    with preamp.scale_loss(model(X, "a").float().sum(), optimizer, loss_id=0) as scaled:
        scaled.backward()
    damage = Damage(model.b.weight, float("inf"))
    damage.armed = True
    with preamp.scale_loss(model(X, "b").float().sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    with pytest.raises(preamp.LossScaleError, match=r"2\*\*-24"):
        optimizer.step()
    (cause,) = engine.overflow_causes
    assert (cause.loss_id, cause.old_scale, cause.new_scale) == (1, 2.0**-23, 2.0**-24)
    assert cause.parameters == ("b.weight",)
    assert engine.loss_scale(0) == 4.0
    assert f"loss scaler 1 reducing loss scale to {2.0**-24}" in capsys.readouterr().out


@levels
def test_an_overflow_names_a_shared_weight_once(level: str) -> None:
    model = Parts()
    ours = two_optimizers(model)
    preamp.initialize(model, ours, opt_level=level, loss_scale="dynamic", verbosity=0)
    with preamp.scale_loss(model(X, "a").float().sum() * float("inf"), ours) as scaled:
        scaled.backward()
    for optimizer in ours:
        optimizer.step()
    overflowed = {name for name, p in model.named_parameters() if p.grad is not None}
    for cause in preamp.engine_of(model).overflow_causes:
        assert len(cause.parameters) == len(set(cause.parameters))
        assert set(cause.parameters) <= overflowed
    assert len(preamp.engine_of(model).overflow_causes) == 2


# -- weights that come to a second optimizer between a backward and a step ------------------------


class Sharing:
    """An optimizer of a model and one of something else, and the same in plain torch."""

    def __init__(self, level: str, build: Build = sgd, **options: Any) -> None:
        self.model, self.side = Parts(), nn.Linear(3, 2)
        self.plain, self.plain_side = copy.deepcopy(self.model), copy.deepcopy(self.side)
        self.ours = [build(part.parameters()) for part in (self.model, self.side)]
        self.theirs = [build(part.parameters()) for part in (self.plain, self.plain_side)]
        models, options = [self.model, self.side], {"loss_scale": 128.0, **options}
        preamp.initialize(models, self.ours, opt_level=level, verbosity=0, **options)
        self.engine = preamp.engine_of(self.model)

    def backward(self, part: str, *optimizers: torch.optim.Optimizer) -> None:
        with preamp.scale_loss(self.loss(self.model, part), optimizers or self.ours[0]) as scaled:
            scaled.backward()
        with preamp.disable_casts():
            self.loss(self.plain, part).backward()

    def loss(self, model: nn.Module, part: str) -> torch.Tensor:
        return model(X, part).float().sum() / 8

    def share(self, *, as_masters: bool = False) -> None:
        """Give the second optimizers the first layer's bias and the second one's weight."""
        held = self.ours[0].param_groups[0]["params"]
        own = [self.model.a.bias, self.model.b.weight]
        params: list[Any] = [held[1], held[2]] if as_masters else own
        self.ours[1].add_param_group({"params": params})
        self.theirs[1].add_param_group({"params": [self.plain.a.bias, self.plain.b.weight]})

    def step(self) -> None:
        for optimizer, other in zip(self.ours, self.theirs, strict=True):
            optimizer.step()
            with preamp.disable_casts():
                other.step()

    def zero(self) -> None:
        for optimizer in (*self.ours, *self.theirs):
            optimizer.zero_grad()

    def check(self) -> None:
        for param, wanted in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            master = self.engine.master_of(param)
            assert_same((param if master is None else master).detach(), wanted.detach())
            if master is not None:
                assert_same(param.detach(), master.detach().to(param.dtype))


def both(run: Sharing, change: Callable[[nn.Module], object]) -> None:
    with torch.no_grad():
        for model in (run.model, run.plain):
            change(model)


def halve(run: Sharing) -> None:
    for optimizer in (run.ours[0], run.theirs[0]):
        for param in preamp.master_params(optimizer):
            param.grad.mul_(0.5)


def load(run: Sharing) -> None:
    state = run.plain.state_dict()
    state = {name: value * 1.5 for name, value in state.items()}
    run.model.load_state_dict(state)
    run.plain.load_state_dict(state)


BEFORE: dict[str, Callable[[Sharing], object]] = {
    "nothing": lambda run: None,
    "a second backward": lambda run: run.backward("b"),
    "gradients read": lambda run: [p.grad for p in preamp.master_params(run.ours[0])],
    "gradients halved": halve,
    "one zeroed": lambda run: both(run, lambda model: model.b.weight.grad.zero_()),
    "one dropped": lambda run: both(run, lambda model: setattr(model.b.weight, "grad", None)),
    "another dropped": lambda run: both(run, lambda model: setattr(model.b.bias, "grad", None)),
    "weights written to": lambda run: both(run, lambda model: model.b.weight.fill_(0.5)),
    "weights loaded": load,
}


# Masters are joined by the same code at all levels, so that the level does not act on the rest.
@pytest.mark.threes
@levels
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("as_masters", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_weights_shared_between_backward_and_step(
    level: str, before: str, as_masters: bool, trained: bool
) -> None:
    run = Sharing(level)
    if trained:
        run.backward("ab")
        run.step()
        run.zero()
    run.backward("ab")
    BEFORE[before](run)
    run.share(as_masters=as_masters)
    run.step()
    run.check()
    run.zero()
    for part in ("a", "ab"):
        run.backward(part, *run.ours)
        run.backward("b", *run.ours)
        run.step()
        run.check()
        run.zero()
    halves = run.engine.master_of(run.model.b.weight)
    if halves is not None:
        assert any(param is halves for param in run.ours[1].param_groups[1]["params"])


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_split_weights_shared_between_backward_and_step(level: str) -> None:
    """What a split master cannot hold is less than the bound."""
    run = Sharing(level, storage="split")
    for _ in range(2):
        run.backward("ab")
        run.step()
        run.zero()
    run.backward("ab")
    run.share()
    run.step()
    run.zero()
    run.backward("ab", *run.ours)
    run.step()
    for param, wanted in zip(run.model.parameters(), run.plain.parameters(), strict=True):
        master = run.engine.master_of(param)
        assert master is not None
        torch.testing.assert_close(master.detach(), wanted.detach(), rtol=2.0**-16, atol=2.0**-20)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("storage", ["full", "split"])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.filterwarnings("ignore:The .* weight .* was written to between two steps")
def test_a_weight_that_joins_shared_ones(level: str, storage: str, loads: bool) -> None:
    """What a script has just written to the weight, or loaded, comes along."""
    run = Sharing(level, storage=storage)
    run.share()
    run.backward("ab", *run.ours)
    run.step()
    run.zero()
    if loads:
        load(run)
    both(run, lambda model: model.b.bias.fill_(0.5))
    for optimizer, model in ((run.ours[1], run.model), (run.theirs[1], run.plain)):
        optimizer.add_param_group({"params": [model.b.bias]})
    assert run.model.b.bias.tolist() == [0.5, 0.5]
    run.backward("ab", *run.ours)
    run.step()
    half, wanted = run.model.b.bias.detach(), run.plain.b.bias.detach()
    assert_same(half, wanted.to(half.dtype))


def share_on_ranks(rank: int) -> list[torch.Tensor]:
    """Train each level without a wrapper, which rounds masters once, and share weights."""
    found: list[torch.Tensor] = []
    for level in WITH_MASTERS:
        run = Sharing(level, lambda params: torch.optim.SGD(params, lr=2.0**-12))
        both(run, lambda model: [param.fill_(1.0) for param in model.parameters()])
        for shares in (False, True, False):
            if shares:
                run.share()
            run.backward("ab", *run.ours)
            run.step()
            run.zero()
        run.check()
        found.append(run.plain.b.weight.detach().clone() + rank)
    return found


@pytest.mark.full
def test_weights_shared_where_ranks_reduce_by_hand(tmp_path: Path) -> None:
    """Masters that have trained are not rounded, as those of a beginning are."""
    first, second = run_ranks(share_on_ranks, tmp_path)
    for mine, theirs in zip(first, second, strict=True):
        assert_same(mine + 1, theirs)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("clips", [False, True])
def test_weights_shared_after_unscale(level: str, clips: bool) -> None:
    run = Sharing(level)
    scaler = preamp.GradScaler(run.ours)
    scaler.scale(run.loss(run.model, "ab")).backward()
    run.loss(run.plain, "ab").backward()
    scaler.unscale_(run.ours[0])
    run.share()
    if clips:
        both(run, lambda model: [param.grad.mul_(0.5) for param in model.parameters()])
    scaler.step(run.ours[0])
    scaler.update()
    run.theirs[0].step()
    run.check()


@levels
@pytest.mark.parametrize("when", ["in a block", "left scaled"])
def test_weights_are_not_shared_while_gradients_are_scaled(level: str, when: str) -> None:
    run = Sharing(level)

    def refused() -> None:
        with pytest.raises(preamp.PreampStateError, match="one of the two still carry"):
            run.share()
        assert len(run.ours[1].param_groups) == 1

    if when == "in a block":
        with preamp.scale_loss(run.loss(run.model, "ab"), run.ours[0]) as scaled:
            scaled.backward()
            refused()
    else:
        with preamp.scale_loss(run.loss(run.model, "a"), run.ours[0], delay_unscale=True) as scaled:
            scaled.backward()
        refused()
        with preamp.scale_loss(run.loss(run.model, "b"), run.ours[0]) as scaled:
            scaled.backward()
    with preamp.disable_casts():
        run.loss(run.plain, "ab").backward()
    run.share()
    run.step()
    run.check()


@levels
def test_an_overflow_is_shared_too(level: str) -> None:
    run = Sharing(level, loss_scale="dynamic")
    with preamp.scale_loss(run.loss(run.model, "ab") * torch.inf, run.ours[0]) as scaled:
        scaled.backward()
    run.share()
    for optimizer in run.ours:
        optimizer.step()
    assert (run.engine.steps_applied, run.engine.steps_skipped) == (0, 2)
    run.zero()
    run.check()
    run.backward("ab", *run.ours)
    run.step()
    run.check()
