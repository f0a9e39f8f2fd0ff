# SPDX-License-Identifier: BSD-3-Clause
"""Initializing again, and what is freed when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import preamp
from cases.levels import F32_WEIGHTS, LEVEL_NAMES
from cases.models import Parts, batch
from preamp.optimizers import FusedAdam


def hooks_of(model: nn.Module) -> int:
    """How many hooks there are on all modules of ``model``."""
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("hooks") and isinstance(hooks, dict)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, coefficients = batch(0)
    with preamp.scale_loss((model(x).float() * coefficients).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_initializing_again_replaces_hooks_and_lets_the_engine_go(level: str) -> None:
    """A new optimizer for the next phase of training; the old one is dropped."""
    model = Parts()
    engines = []
    counts = []
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert preamp.engine_of(model) is preamp.engine_of(optimizer)
        engines.append(weakref.ref(preamp.engine_of(model)))
        counts.append(hooks_of(model))
        train(model, optimizer)
    assert len(set(counts)) == 1
    gc.collect()
    assert [ref() is None for ref in engines] == [True, True, False]
    preamp.engine_of(model).close()
    assert hooks_of(model) == 0
    with pytest.raises(preamp.PreampStateError, match="has no engine"):
        preamp.engine_of(model)


@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_an_optimizer_initialized_earlier_goes_on(level: str) -> None:
    """Two optimizers of one model, initialized one after the other, as Apex allowed."""
    model = Parts()
    first = torch.optim.SGD(model.a.parameters(), lr=0.5)
    second = torch.optim.SGD(model.b.parameters(), lr=0.5)
    preamp.initialize(model, first, opt_level=level, verbosity=0)
    preamp.initialize(model, second, opt_level=level, verbosity=0)
    before = [param.detach().clone() for param in model.parameters()]
    train(model, first)
    train(model, second)
    assert not any(
        torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    )
    for optimizer in (first, second):
        preamp.engine_of(optimizer).close()
    assert hooks_of(model) == 0


@pytest.mark.apex("10 A-9")
def test_initializing_again_at_a_level_without_casts_ends_the_casts() -> None:
    """A-9: O1's casts stayed on for good."""
    model = Parts()
    preamp.initialize(model, opt_level="O1", scope="thread", verbosity=0)
    assert torch.is_autocast_enabled("cpu")
    preamp.initialize(model, opt_level="O0", verbosity=0)
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(1, 3)).dtype is torch.float32


def test_a_failed_call_leaves_the_earlier_engine_in_place() -> None:
    model = Parts()
    preamp.initialize(model, opt_level="O1", verbosity=0)
    engine = preamp.engine_of(model)
    hooks = hooks_of(model)
    taken = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(Parts(), taken, opt_level="O0", verbosity=0)
    with pytest.raises(preamp.PreampStateError, match="one engine at a time"):
        preamp.initialize(model, taken, opt_level="O1", verbosity=0)
    assert preamp.engine_of(model) is engine
    assert hooks_of(model) == hooks


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.usefixtures("without_collector")
def test_a_closed_engine_holds_nothing(level: str) -> None:
    """After close() everything goes with its last reference, without the cycle collector."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer)
    engine = preamp.engine_of(model)
    masters = [weakref.ref(param) for param in preamp.master_params(optimizer)]
    engine.close()
    parts = [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]
    del model, optimizer, engine
    assert [ref() for ref in (*parts, *masters)] == [None] * len([*parts, *masters])


def test_a_closed_engine_that_is_kept_holds_no_masters() -> None:
    model = nn.Linear(64, 64)
    model, optimizer = preamp.initialize(
        model, FusedAdam(model.parameters()), opt_level="O5", verbosity=0
    )
    engine = preamp.engine_of(model)
    with preamp.scale_loss(model(torch.randn(2, 64)).float().sum(), optimizer) as scaled:
        scaled.backward()
    masters = [weakref.ref(param) for param in preamp.master_params(optimizer)]
    engine.close()
    gc.collect()
    assert [ref() for ref in masters] == [None, None]
    assert engine.closed


@pytest.mark.parametrize("masters", [False, True])
def test_fused_optimizers_hold_no_state_beside_their_own(masters: bool) -> None:
    """Moments that a script clears, or of parameters that are gone, are freed at once."""
    param = nn.Parameter(torch.randn(64).to(torch.bfloat16 if masters else torch.float32))
    optimizer = FusedAdam([param], capturable=masters, master_weights=masters)
    param.grad = torch.ones_like(param)
    optimizer.step()
    moments = [weakref.ref(value) for value in optimizer.state[param].values()]
    assert len(moments) == 3 if masters else 2
    gone, key = weakref.ref(param), "exp_avg"
    optimizer.param_groups.clear()
    optimizer.state.clear()
    gc.collect()
    if not masters:
        assert [ref() for ref in moments] == [None] * len(moments)
    del param
    other = nn.Parameter(torch.randn(64).to(torch.bfloat16 if masters else torch.float32))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones_like(other)
    optimizer.step()
    gc.collect()
    assert [ref() for ref in (*moments, gone)] == [None] * (len(moments) + 1)
    assert key in optimizer.state[other]


def test_zero_grad_keeps_its_label_and_whoever_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = preamp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0
    )
    with torch.profiler.profile() as profile:
        optimizer.zero_grad()
    assert "Optimizer.zero_grad#SGD.zero_grad" in {event.key for event in profile.key_averages()}
    called: list[bool] = []
    monkeypatch.setattr(
        torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: called.append(True)
    )
    optimizer.zero_grad()
    assert called == [True]
