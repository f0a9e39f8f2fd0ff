# SPDX-License-Identifier: BSD-3-Clause
"""Models and optimizers copied, pickled or saved together, alone, and with what refers to them.

What a copy does is held against a float32 model without any engine that was given the same values
and the same state by ``load_state_dict``: from there on all bits have to be equal.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from kit.compare import same
from kit.loops import loss_of, make, train_plain, train_step, weights
from kit.run import Net
from preamp.compat.stash import attach_stashes

MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)
Build = Callable[[Any], torch.optim.Optimizer]

BUILDS: dict[str, Build] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.0625, eps=1e-4),
    "FusedAdam": lambda params: preamp.optimizers.FusedAdam(params, lr=0.0625, eps=1e-4),
}


class Agent:
    """Holds both, and lists of parameters, as programs do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.model = model


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CALLS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "save": saved,
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def as_agent(model: Any, optimizer: Any, call: Any) -> tuple[Any, Any]:
    made = call(Agent(model, optimizer))
    return made.model, made.optimizer


def as_dict(model: Any, optimizer: Any, call: Any) -> tuple[Any, Any]:
    made = call({"model": model, "optimizer": optimizer})
    return made["model"], made["optimizer"]


def inside_of_exact_weights(model: Any, optimizer: Any, call: Any) -> tuple[Any, Any]:
    with preamp.engine_of(model).exact_weights():
        return call((model, optimizer))


HOLDERS: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "model first": lambda model, optimizer, call: call((model, optimizer)),
    "optimizer first": lambda model, optimizer, call: call((optimizer, model))[::-1],
    "dict": as_dict,
    "agent": as_agent,
    "inside of exact_weights": inside_of_exact_weights,
}


def started(level: str, build: str = "SGD", model: Any = Net, **more: Any) -> Any:
    torch.manual_seed(0)
    net = model()
    trained = [param for param in net.parameters() if param.requires_grad]
    arguments = {"opt_level": level, "verbosity": 0, "backend": "reference"} | more
    return preamp.initialize(net, BUILDS[build](trained), **arguments)


def plain_pair(model: nn.Module, optimizer: Any, build: str, make_model: Any = Net) -> Any:
    """Float32 and torch alone, brought to where ``model`` and ``optimizer`` are."""
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    other: Any = BUILDS[build]([p for p in plain.parameters() if p.requires_grad])
    if hasattr(optimizer, "storage"):
        other.storage, other.backend = optimizer.storage, optimizer.backend
    other.load_state_dict(optimizer.state_dict())
    return plain, other


def check_goes_on_as(made: Any, plain: Any) -> None:
    for number in range(10, 13):
        for model, optimizer in (made, plain):
            train_plain(model, optimizer, number)
    assert same(weights(made[0]), weights(plain[0]))
    assert same(made[1].state_dict(), plain[1].state_dict())


# -- both ------------------------------------------------------------------------------------


# Holders and calls decide in which order objects are copied, levels and storages which ones are.
@pytest.mark.pairs
@pytest.mark.parametrize(
    ("level", "build", "storage"),
    [
        *((level, build, "full") for level in LEVEL_NAMES if level != "O3" for build in BUILDS),
        *itertools.product(WITH_MASTERS, ["FusedAdam"], ["split", "compact"]),
    ],
)
@calls
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_pair_goes_on_in_float32(
    level: str, call: Any, holder: str, build: str, storage: str
) -> None:
    model, optimizer = started(level, build, storage=storage)
    for number in range(2):
        train_step(model, optimizer, number)
    plain = plain_pair(model, optimizer, build)
    before = weights(model)
    made = HOLDERS[holder](model, optimizer, call)
    assert {p.dtype for p in made[0].parameters()} == {torch.float32}
    check_goes_on_as(made, plain)
    assert same(weights(model), before)
    train_step(model, optimizer, 2)  # nothing happened to it


@calls
def test_a_pair_without_masters_stays_half(call: Any) -> None:
    model, optimizer = started("O3")
    train_step(model, optimizer, 0)
    made, made_optimizer = call((model, optimizer))
    params = made_optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, made.parameters(), strict=True))


@MASTERS
@calls
def test_two_optimizers_and_schedulers(level: str, call: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = [model.first.parameters(), [*model.last.parameters(), *model.ln.parameters()]]
    optimizers = [BUILDS["SGD"](groups[0]), BUILDS["Adam"](groups[1])]
    preamp.initialize(model, optimizers, opt_level=level, verbosity=0)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
    with preamp.scale_loss(loss_of(model, 0), optimizers) as scaled:
        scaled.backward()
    for thing in (*optimizers, *schedulers):
        thing.step()
    twin, others, rates = call((model, optimizers, schedulers))
    before = weights(twin)
    loss_of(twin, 1).backward()
    for one in others:
        one.step()
    after = weights(twin)
    assert all(not same(before[name], after[name]) for name in ("first.weight", "last.weight"))
    assert [one.optimizer for one in rates] == others
    rates[0].step()
    assert others[0].param_groups[0]["lr"] == 0.125 / 4


@MASTERS
def test_lists_of_parameters_are_those_of_the_model(level: str) -> None:
    model, optimizer = started(level)
    frozen = model.first.weight.requires_grad_(False)
    train_step(model, optimizer, 0)
    for order in ((0, 1, 2), (2, 1, 0), (2, 0, 1)):
        things: list[Any] = [[*model.parameters()], model, optimizer]
        copied = copy.deepcopy([things[index] for index in order])
        made: dict[int, Any] = dict(zip(order, copied, strict=True))
        own = [*made[1].parameters()]
        assert all(a is b for a, b in zip(made[0], own, strict=True))
        assert all(any(p is q for q in own) for p in made[2].param_groups[0]["params"])
        assert same(weights(made[1]), dict(model.state_dict()))
        assert not own[0].requires_grad
    assert frozen.dtype is not torch.float32


@MASTERS
@calls
def test_parts_of_a_model_and_its_optimizer(level: str, call: Any) -> None:
    model, optimizer = started(level)
    part, other = call((model.last, optimizer))
    assert any(p is part.weight for p in other.param_groups[0]["params"])
    other.step()  # has a model, if not all of it


@MASTERS
@calls
def test_what_was_written_to_half_weights_is_copied(level: str, call: Any) -> None:
    model, optimizer = started(level)
    with torch.no_grad():
        model.last.weight.fill_(0.75)
    for made in (call((optimizer, model))[1], call(model)):
        assert (made.last.weight == 0.75).all()


@MASTERS
def test_copies_have_no_gradients(level: str) -> None:
    model, optimizer = started(level)
    with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    made = copy.deepcopy((model, optimizer))
    assert all(param.grad is None for param in made[0].parameters())
    optimizer.step()


# -- models of other kinds -------------------------------------------------------------------


class Tied(nn.Module):
    """A frozen weight in two places, a recurrent layer's flat weights, a buffer of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.into.weight
        self.rnn = nn.LSTM(4, 3)
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 2.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.again(self.into(x)))[0] * self.scale


def weight_normed() -> nn.Module:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.first)
    return model


def traced() -> nn.Module:
    """A module that torch pickles by code of its own."""
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))


@MASTERS
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *itertools.product((Tied, traced), CALLS.values()),
        (weight_normed, copy.deepcopy),  # torch pickles no parametrized module
    ],
)
def test_models_of_other_kinds(level: str, kind: Any, call: Any) -> None:
    model, optimizer = started(level, model=kind)
    train_step(model, optimizer, 0)
    plain = plain_pair(model, optimizer, "SGD", kind)
    made, other = call((model, optimizer))
    assert {t.dtype for t in made.state_dict().values()} <= {torch.float32, torch.int64}
    if kind is Tied:
        assert made.into.weight is made.again.weight
    check_goes_on_as((made, other), plain)


@MASTERS
@pytest.mark.parametrize("call", [pickled, saved])
def test_marks_on_parameters_are_pickled(level: str, call: Any) -> None:
    """As torch has it, of trained weights and of frozen ones."""
    model, optimizer = started(level)
    model.last.bias.requires_grad_(False)
    for param in model.last.parameters():
        param.no_decay = "yes"
    made, _ = call((model, optimizer))
    assert all(param.no_decay == "yes" for param in made.last.parameters())


@pytest.mark.parametrize("level", [level for level in LEVEL_NAMES if level != "O3"])
def test_a_pickled_model_needs_no_preamp(level: str) -> None:
    class Watched(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith("preamp"), (module, name)
            return super().find_class(module, name)

    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    made = Watched(io.BytesIO(pickle.dumps(model))).load()
    assert same(weights(made), dict(model.state_dict()))


@MASTERS
def test_a_copy_of_a_copy_and_a_new_engine(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    plain = plain_pair(model, optimizer, "SGD")
    made = copy.deepcopy(pickled(copy.deepcopy((model, optimizer))))
    check_goes_on_as(made, plain)
    again, other = preamp.initialize(*made, opt_level=level, verbosity=0)
    train_step(again, other, 1)
    preamp.engine_of(again).close()
    assert "__reduce_ex__" not in vars(again) | vars(other)


# -- optimizers of other kinds -----------------------------------------------------------------


class CopiesAll(torch.optim.SGD):
    """Has all of its attributes copied, where torch has three."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, momentum=0.5)
        self.own = ["kept"]

    def __getstate__(self) -> Any:
        return self.__dict__


def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    optimizer.own.append("step")


@pytest.mark.parametrize("level", [level for level in LEVEL_NAMES if level != "O3"])
@calls
@pytest.mark.parametrize("has_stash", [False, True])
def test_an_optimizer_that_copies_all_attributes(level: str, call: Any, has_stash: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer: Any = CopiesAll(net.parameters())
    optimizer.register_step_pre_hook(count_step)
    model, optimizer = preamp.initialize(net, optimizer, opt_level=level, verbosity=0)
    if has_stash:
        attach_stashes(preamp.engine_of(model))
    train_step(model, optimizer, 0)
    plain = plain_pair(model, optimizer, "SGD")
    attached = dict(vars(optimizer))
    made, other = call((model, optimizer))
    assert vars(optimizer) == attached
    assert {"step", "zero_grad", "add_param_group"}.isdisjoint(vars(other))
    check_goes_on_as((made, other), plain)
    assert other.own == ["kept", *["step"] * 4]
    train_step(model, optimizer, 1)
    assert optimizer.own == ["kept", *["step"] * 2]


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_scheduler_stays_behind_and_attributes_of_the_user_come_along(level: str) -> None:
    net = Net()
    optimizer: Any = CopiesAll(net.parameters())
    optimizer.my_hooks = dict.fromkeys(range(20), "kept")
    model, optimizer = preamp.initialize(net, optimizer, opt_level=level, verbosity=0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a function around the step
    train_step(model, optimizer, 0)
    made = pickle.loads(pickle.dumps(optimizer))
    assert "step" not in vars(made)
    assert made.my_hooks == optimizer.my_hooks == dict.fromkeys(range(20), "kept")
    preamp.engine_of(optimizer).close()
    assert len(optimizer.my_hooks) == 20


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_wrapper_with_the_attributes_of_an_optimizer_is_copied_as_itself(level: str) -> None:
    class Slow:
        def __init__(self, optimizer: Any) -> None:
            vars(self).update(vars(optimizer))

    net = Net()
    _, optimizer = preamp.initialize(
        net, BUILDS["SGD"](net.parameters()), opt_level=level, verbosity=0
    )
    assert type(copy.copy(Slow(optimizer))) is Slow


@MASTERS
def test_an_optimizer_that_copies_all_attributes_needs_its_model(level: str) -> None:
    net = Net()
    _, optimizer = preamp.initialize(net, CopiesAll(net.parameters()), opt_level=level, verbosity=0)
    with pytest.raises(preamp.PreampStateError, match="copied or loaded without its model"):
        copy.deepcopy(optimizer).step()


# -- an optimizer without its model ------------------------------------------------------------


@MASTERS
@calls
@pytest.mark.parametrize("build", BUILDS)
def test_an_optimizer_that_lost_its_model_says_so(level: str, call: Any, build: str) -> None:
    model, optimizer = started(level, build)
    train_step(model, optimizer, 0)
    made = call(optimizer)
    with pytest.raises(preamp.PreampStateError) as caught:
        made.step()
    assert "copied or loaded without its model" in str(caught.value)
    assert "belong to a model only if both are copied" in str(caught.value)
    assert "copy.deepcopy((model, optimizer))" in str(caught.value)
    for param in made.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    made.step()
    made.zero_grad()
    made.step()  # as torch does, once it has trained


@MASTERS
@calls
def test_a_pair_may_step_without_gradients(level: str, call: Any) -> None:
    """Some scripts do, to have an optimizer make its state."""
    made, other = call(started(level, "Adam"))
    other.zero_grad()
    other.step()
    train_plain(made, other, 0)


@MASTERS
def test_closures_make_gradients_themselves(level: str) -> None:
    made = copy.deepcopy(started(level)[1])

    def closure() -> torch.Tensor:
        loss = sum((p**2).sum() for p in made.param_groups[0]["params"])
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    made.step(closure)


def test_the_plain_pair_is_what_torch_has() -> None:
    """The same calls without any engine, for what the tests above take for granted."""
    model, optimizer = make()
    made, other = copy.deepcopy((model, optimizer))
    assert all(
        a is b for a, b in zip(made.parameters(), other.param_groups[0]["params"], strict=True)
    )
    copy.deepcopy(optimizer).step()
