# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers in another object that forwards to them, as frameworks have them."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import EXACT
from cases.pair import Pair
from preamp.engine import serve_imitations
from preamp.fp16_utils import FP16_Optimizer


class Forwards(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class, without anything of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


class Imitates:
    """As Lightning's: it takes the class of the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitation", (Imitates, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class HasGroups:
    """As mmengine's: no optimizer by its class, and without a state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Lookahead(torch.optim.Optimizer):
    """Shares the groups and has a state: an optimizer by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.optimizer.step(closure)


WRAPPERS = [Forwards, Imitates, HasGroups, lambda inner: Forwards(Imitates(inner))]
IDS = ["forwards", "imitates", "has groups", "nested"]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_name_looks_into_a_wrapper(level: str, wrap: Any) -> None:
    pair = Pair(level)
    wrapped = wrap(pair.optimizer)
    assert preamp.engine_of(wrapped) is pair.engine
    with preamp.scale_loss(pair.loss(0), [wrapped]) as scaled:
        scaled.backward()
    pair.theirs(0)
    norm = preamp.clip_grad_norm_(wrapped, 1e9)
    assert float(norm) > 0
    scheduler = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1)
    pair.step()
    assert preamp.step_scheduler(scheduler, wrapped)
    pair.zero()
    pair.check()
    assert preamp.state_dict(wrapped) == pair.engine.state_dict()
    assert len(list(preamp.master_params(wrapped))) == len(list(pair.model.parameters()))


@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_initialize_and_a_grad_scaler_take_a_wrapper(wrap: Any) -> None:
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped = wrap(inner)
    returned = preamp.initialize(model, wrapped, opt_level="O2", verbosity=0)
    assert returned[1] is wrapped
    assert preamp.engine_of(inner) is preamp.engine_of(wrapped)
    scaler = preamp.GradScaler(wrapped, init_scale=8.0)
    before = [param.clone() for param in model.parameters()]
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.unscale_(wrapped)
    scaler.step(wrapped if hasattr(wrapped, "step") else inner)
    scaler.update()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert preamp.engine_of(model).steps_applied == 1


def test_an_optimizer_with_a_state_of_its_own_is_not_looked_through() -> None:
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = Lookahead(inner)
    preamp.initialize(model, outer, opt_level="O2", verbosity=0)
    engine = preamp.engine_of(outer)
    assert engine.optimizers == (outer,)
    with preamp.scale_loss(model(torch.ones(3, 4)).sum() * torch.inf, outer) as scaled:
        scaled.backward()
    outer.step()
    assert outer.calls == 0  # a skipped step is a step that did not happen
    assert engine.steps_skipped == 1


def test_an_optimizer_that_scales_by_itself_is_not_looked_through() -> None:
    model = nn.Linear(4, 2).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(TypeError, match="FP16_Optimizer"):
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, allow_half_model=True)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_imitation_drops_gradients_and_adds_groups_as_the_optimizer_does(level: str) -> None:
    pair = Pair(level)
    serve_imitations(pair.engine)
    serve_imitations(pair.engine)  # as for a second model of the same engine
    wrapped: Any = Imitates(pair.optimizer)
    for index in range(6):
        pair.backward(index)
        if index % 2:
            pair.step()
        wrapped.zero_grad()  # drops every second batch unused
        pair.plain_optimizer.zero_grad()
        assert all(param.grad is None for param in pair.model.parameters())
    pair.check()
    late = nn.Parameter(torch.ones(3))
    wrapped.add_param_group({"params": [late]})
    assert id(late) in pair.engine.updated_params()
    with pytest.raises(ValueError, match=r"more than one parameter group|already"):
        wrapped.add_param_group({"params": list(pair.model.parameters())[:1]})


def test_an_imitated_class_is_the_optimizers_own_elsewhere() -> None:
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, inner, opt_level="O2", verbosity=0)
    engine = preamp.engine_of(model)
    serve_imitations(engine)
    wrapped: Any = Imitates(inner)
    assert type(pickle.loads(pickle.dumps(inner))) is type(copy.deepcopy(inner)) is torch.optim.SGD
    assert isinstance(wrapped, torch.optim.SGD)
    engine.close()
    assert type(inner) is torch.optim.SGD
    model(torch.ones(3, 4)).sum().backward()
    wrapped.zero_grad()
    assert model.weight.grad is None


# -- optimizers that skip Optimizer.__init__ ----------------------------------------------------


class Skips(torch.optim.Optimizer):
    """As fastai's `OptimWrapper` in trainers: the optimizer inside is not called ``optimizer``."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    state = property(lambda self: self.opt.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.opt.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.opt.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is None
        for group in self.opt.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)  # its own weight decay
        self.opt.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        self.opt.add_param_group(param_group)


class SkipsAndForwards(Skips):
    """The same, with every other name of the one inside."""

    def __getattr__(self, name: str) -> Any:
        return None if name == "opt" else getattr(self.opt, name, None)


class SkipsAlone(torch.optim.Optimizer):
    """Without any inside."""

    def __init__(self, params: Any) -> None:
        self.defaults, self.state = {}, defaultdict(dict)
        self.param_groups = [{"params": list(params)}]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is None
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.5).sub_(param.grad, alpha=0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None


def skips(params: Any) -> Skips:
    return Skips(torch.optim.SGD(params, lr=0.5, momentum=0.5))


def skips_and_forwards(params: Any) -> Skips:
    return SkipsAndForwards(torch.optim.SGD(params, lr=0.5, momentum=0.5))


BUILDS = pytest.mark.parametrize("build", [skips, skips_and_forwards, SkipsAlone])


@BUILDS
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", EXACT)
def test_an_optimizer_that_skips_its_base_s_init_trains(level: str, scale: Any, build: Any) -> None:
    pair = Pair(level, build, loss_scale=scale)
    pair.optimizer.param_groups[0]["marked"] = True
    for index in range(2):
        pair.train(index)
        pair.check(f"after step {index}")
    if scale == "dynamic":
        before = [param.detach().clone() for param in pair.model.parameters()]
        pair.overflow()
        pair.optimizer.step()
        pair.zero()
        assert all(map(torch.equal, before, pair.model.parameters()))
        pair.train(2)
        pair.check("after a skipped step")
    assert pair.engine.steps_applied == (3 if scale == "dynamic" else 2)


@BUILDS
def test_closed_it_is_as_before(build: Any) -> None:
    pair = Pair("O2", build)
    held = pair.optimizer.step
    pair.train(0)
    pair.engine.close()
    assert not [name for name in vars(pair.optimizer) if "hook" in name or name == "step"]
    inside = getattr(pair.optimizer, "opt", None)
    if inside is not None:
        assert not [name for name, own in vars(inside).items() if "_hooks" in name and own]
    for step in (pair.optimizer.step, held):
        pair.plain_loss(1).backward()
        pair.model.load_state_dict(pair.plain.state_dict())
        for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            ours.grad = plain.grad.clone()
        step()
        pair.plain_step()
        pair.plain_optimizer.zero_grad()
        assert all(map(torch.equal, pair.model.parameters(), pair.plain.parameters()))


@BUILDS
def test_it_may_share_a_call_and_have_a_scheduler(build: Any) -> None:
    pair = Pair("O2", build, loss_scale=128.0)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: 0.5**epoch)
        for one in (pair.optimizer, pair.plain_optimizer)
        if "lr" in one.param_groups[0]
    ]
    for index in range(3):
        pair.train(index)
        for scheduler in schedulers:
            scheduler.step()
    pair.check()


def test_an_optimizer_inside_does_not_speak_for_one_around_it() -> None:
    """The flag that the device would read is given to the optimizer of the engine alone."""
    model = nn.Linear(2, 2)
    inside = preamp.optimizers.FusedAdam(model.parameters(), lr=0.5)
    around = SkipsAndForwards(inside)
    with pytest.raises(TypeError, match="Moments are kept in fewer bits by"):
        preamp.initialize(model, around, opt_level="O2", storage="compact", verbosity=0)
    preamp.initialize(model, around, opt_level="O2", verbosity=0)
    session = preamp.engine_of(model).sessions[id(around)]
    assert inside._step_supports_amp_scaling
    assert not session.obeys_on_device
