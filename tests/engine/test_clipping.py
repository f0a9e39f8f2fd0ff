# SPDX-License-Identifier: BSD-3-Clause
"""Clipping: what may be clipped, by every kind of norm, and clips of what is still scaled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import preamp
import preamp.optimizers
from cases.host_reads import far_from_the_host
from cases.levels import BY_NAME, EXACT, LEVEL_NAMES, WITH_MASTERS
from cases.models import Parts, batch, values
from cases.ranks import one_rank
from cases.tolerances import assert_same
from kit.loops import begin, scaled_backward
from kit.pair import Pair
from kit.refusals import assert_refused, refused
from preamp.kernels.by_device import ByDevice
from preamp.optimizers import FusedAdam

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("earlier", [0, 1], ids=["one backward", "two"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_some_of_an_optimizer_are_clipped_and_no_others(
    level: str, earlier: int, order: float
) -> None:
    pair = Pair(level, loss_scale=64.0)
    for index in range(earlier + 1):
        pair.ours(index)
    masters = list(preamp.master_params(pair.optimizer))
    before = copy.deepcopy([master.grad for master in masters])
    if not earlier:  # reading the masters' gradients has made them; make them wait again
        pair.optimizer.zero_grad()
        pair.ours(0)
    params = list(pair.model.parameters())
    some = [0, len(params) - 1]
    norm = preamp.clip_grad_norm_((params[place] for place in some), 0.01, order)
    wide = [before[place].float() for place in some]  # type: ignore[union-attr]
    expected = torch.nn.utils.get_total_norm(wide, order)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    factor = min(1.0, 0.01 / (float(expected) + 1e-6))
    assert factor < 1
    for place, (master, grad) in enumerate(zip(masters, before, strict=True)):
        assert master.grad is not None
        assert grad is not None
        if place in some:
            torch.testing.assert_close(master.grad, grad * factor, rtol=2e-3, atol=1e-6)
        else:
            assert_same(master.grad, grad)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_tensor_and_a_frozen_one(level: str) -> None:
    pair = Pair(level)
    first, *_ = params = list(pair.model.parameters())
    pair.ours(0)
    alone = preamp.clip_grad_norm_([first], 1e9)
    assert_same(preamp.clip_grad_norm_(first, 1e9), alone)
    outside = nn.Parameter(torch.ones(3))  # without a gradient it adds nothing
    assert_same(preamp.clip_grad_norm_([first, outside], 1e9), alone)
    assert float(preamp.clip_grad_norm_(params, 1e9)) > float(alone)
    pair.optimizer.zero_grad()
    assert preamp.clip_grad_norm_(params, 1.0).item() == 0.0


def test_a_norm_that_is_not_finite_raises_where_asked_for() -> None:
    pair = Pair("O2")
    pair.overflow()
    with refused("clipping", "an infinite norm", pair.model):
        preamp.clip_grad_norm_(pair.model.parameters(), 1.0, error_if_nonfinite=True)
    assert not preamp.clip_grad_norm_(pair.model.parameters(), 1.0).isfinite()


STRAY = nn.Parameter(torch.ones(3))
STRAY.grad = torch.ones(3)


REFUSED: dict[str, Callable[[nn.Module, nn.Module], Any]] = {  # of two engines
    "models of two engines": lambda one, other: [*one.parameters(), *other.parameters()],
    "a parameter of no optimizer": lambda *_: nn.Parameter(torch.ones(3)),
    "one of no optimizer beside others": lambda one, _: [*one.parameters(), STRAY],
    "a generator that is used up": lambda *_: (param for param in ()),
    "a number": lambda *_: 1.0,
    "a list of a number": lambda *_: [1.0],
    "nothing": lambda *_: None,
    "a model": lambda one, _: one,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused(name: str) -> None:
    pairs = [Pair("O2"), Pair("O2")]
    for pair in pairs:
        pair.ours(0)
    models = [pair.model for pair in pairs]
    params = REFUSED[name](*models)
    assert_refused("clipping", name, lambda: preamp.clip_grad_norm_(params, 1.0), *models)


# -- every kind of norm, at every level, against float64 -------------------------------------------


ORDERS = [0.5, 1, 2, 3, math.inf]


def exact_norm(grads: list[torch.Tensor], order: float) -> float:
    every = torch.cat([grad.detach().double().flatten() for grad in grads])
    return float(torch.linalg.vector_norm(every, order))


@levels
@pytest.mark.parametrize("order", ORDERS)
def test_norm_and_clipped_gradients(level: str, order: float) -> None:
    pair = Pair(level, loss_scale=64.0)
    pair.backward(0)
    wanted = [param.grad.float() for param in pair.plain.parameters() if param.grad is not None]
    expected = exact_norm(wanted, order)
    norm = preamp.clip_grad_norm_(pair.optimizer, 0.01, norm_type=order)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    for master, grad in zip(pair.masters, wanted, strict=True):
        shrunk = grad * (0.01 / (expected + 1e-6))
        torch.testing.assert_close(master.grad.float(), shrunk, rtol=2e-3, atol=1e-6)
    pair.optimizer.zero_grad()
    pair.ours(0)
    preamp.clip_grad_norm_(pair.optimizer, 1e9, norm_type=order)
    for master, grad in zip(pair.masters, wanted, strict=True):
        assert_same(master.grad.float(), grad)


@pytest.mark.parametrize("order", ORDERS)
def test_float64_and_empty_gradients_beside_half_ones(order: float) -> None:
    weights = torch.zeros(5).double(), torch.zeros(0).half(), torch.zeros(90_000).half()
    optimizer = torch.optim.SGD(map(nn.Parameter, weights), lr=1.0)
    preamp.initialize(nn.Linear(1, 1), optimizer, opt_level="O3", verbosity=0)
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    norm = preamp.clip_grad_norm_(optimizer, 1e9, norm_type=order)
    assert float(norm) == pytest.approx(exact_norm([torch.ones(90_005)], order), rel=1e-5)


# -- the norm that the census takes along ----------------------------------------------------------


scaling = pytest.mark.parametrize("level", EXACT)


def clipped(level: str) -> Pair:
    """A pair that was clipped once, so that norms are taken along."""
    pair = Pair(level, FusedAdam, loss_scale="dynamic")
    pair.engine.scaler(0).set_scale(64.0)
    pair.ours(0)
    preamp.clip_grad_norm_(pair.optimizer, 0.1)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    return pair


def assert_norm(pair: Pair) -> None:
    norm = preamp.clip_grad_norm_(pair.optimizer, math.inf)
    grads = [torch.zeros(1), *(m.grad for m in pair.masters if m.grad is not None)]
    assert float(norm) == pytest.approx(exact_norm(grads, 2), rel=1e-5)


def penalty(pair: Pair) -> None:
    """On the master of a weight whose half gradient is not there."""
    pair.optimizer.zero_grad()
    pair.ours(1, "a")
    pair.masters[2].double().square().sum().backward()


def written_outside(pair: Pair) -> None:
    """No loss scale is on what a backward outside of blocks makes."""
    pair.optimizer.zero_grad()
    pair.loss(1).backward()
    params: Any = list(pair.model.parameters())
    params[0].grad[1:] = 0
    params[2].grad.mul_(1)


def replaced(pair: Pair) -> None:
    for master in pair.masters:
        master.grad = None
        master.grad = torch.full_like(master, 100.0)


def other_memory(pair: Pair) -> None:
    for param in pair.model.parameters():
        param.grad.data = param.grad.data * 3


CHANGES: dict[str, Callable[[Pair], object]] = {
    "drop": lambda pair: setattr(pair.masters[0], "grad", None),
    "accumulate": lambda pair: pair.ours(2),
    "assign": lambda pair: setattr(first := pair.masters[0], "grad", torch.ones_like(first)),
    "write": lambda pair: pair.masters[0].grad.mul_(3.0),
    "penalty": penalty,
    "written outside": written_outside,
    "replaced": replaced,
    "other memory": other_memory,
}


@scaling
@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_of_other_gradients_is_taken_anew(level: str, change: str) -> None:
    pair = clipped(level)
    pair.ours(1)
    CHANGES[change](pair)
    assert_norm(pair)


@scaling
def test_gradients_reduced_by_hand_have_another_norm(level: str) -> None:
    """all_reduce writes to gradients without raising their version."""
    pair = clipped(level)
    with one_rank():
        pair.ours(1)
        for param in pair.model.parameters():
            assert param.grad is not None
            param.grad.data.mul_(3.0)  # as if there were more ranks
        assert_norm(pair)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_clipping_for_two_optimizers_of_the_same_weights(level: str) -> None:
    """What the first clip has shrunk is small already when the second one looks."""
    model = Parts()
    optimizers = begin(level, model, [FusedAdam(model.parameters()) for _ in range(2)])
    preamp.engine_of(model).scaler(0).set_scale(64.0)
    for _ in range(2):
        scaled_backward(model(batch(0)[0]).float().sum(), optimizers)
        first, second = (preamp.clip_grad_norm_(optimizer, 0.1) for optimizer in optimizers)
        assert first > 0.1
        torch.testing.assert_close(second, torch.tensor(0.1), rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_the_census_takes_a_norm_only_while_somebody_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second clip on, which then takes no pass of its own."""
    pair, asked, passes = Pair("O2", FusedAdam), list[bool](), list[int]()
    census, l2norm = ByDevice.census, ByDevice.l2norm

    def note(self: Any, grads: Any, device: Any, **options: Any) -> Any:
        asked.append(options["with_norm"])
        return census(self, grads, device, **options)

    def count(self: Any, grads: Any, *rest: Any) -> Any:
        passes.append(len(grads))
        return l2norm(self, grads, *rest)

    monkeypatch.setattr(ByDevice, "census", note)
    monkeypatch.setattr(ByDevice, "l2norm", count)
    for clips in (True, True, False, False):
        pair.ours(0)
        if clips:
            preamp.clip_grad_norm_(pair.optimizer, 0.1)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    assert asked == [False, True, True, False]
    assert len(passes) == 1


def test_far_from_the_host_no_clip_enlarges(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)
    pair = Pair("O2", loss_scale=64.0)
    pair.backward(0)
    preamp.clip_grad_norm_(pair.optimizer, 1e9)
    pair.check_grads()


def test_scaled_squares_that_overflow_are_not_believed() -> None:
    pair = clipped("O0")
    pair.engine.scaler(0).set_scale(2.0**24)  # finite, but times that too large to be squared
    scaled_backward(pair.loss(1) * 1e16, pair.optimizer)
    assert_norm(pair)


# -- clips of gradients that are still scaled ------------------------------------------------------


def refused_at(level: str, name: str) -> Any:
    half = str(BY_NAME[level].half).removeprefix("torch.")
    return refused("doors", name, changes=True, half=half)


OVERFLOWING = pytest.mark.parametrize(("level", "scale"), [("O2", 2.0**22), ("O5", 2.0**100)])
"""Scales whose gradients are finite in half precision while their norm is not."""


def signed(pair: Pair) -> Pair:
    """Let gradients have both signs: by these zeros of a clip differ from a script's zeros."""
    for model in (pair.model, pair.plain):
        for param in model.parameters():
            sign = torch.ones(param.shape)
            sign.view(-1)[::2] = -1.0
            param.register_hook(lambda grad, sign=sign: grad * sign.to(grad.dtype))
    return pair


@OVERFLOWING
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("door", ["step", "read", "clip", "backward"])
def test_clipping_scaled_gradients_to_nothing_is_noticed_at_every_door(
    level: str, scale: Any, read: bool, door: str
) -> None:
    pair = signed(Pair(level, loss_scale=scale))
    pair.backward(0)
    if read:
        pair.check_grads()
    before = values(pair.optimizer)
    assert not clip_grad_norm_(pair.model.parameters(), 1.0).isfinite()
    doors: dict[str, Callable[[], object]] = {
        "step": pair.optimizer.step,
        "read": lambda: [master.grad for master in preamp.master_params(pair.optimizer)],
        "clip": lambda: preamp.clip_grad_norm_(pair.optimizer, 1.0),
        "backward": lambda: pair.ours(1),
    }
    with refused_at(level, "a write to scaled gradients"):
        doors[door]()
    for now, was in zip(values(pair.optimizer), before, strict=True):
        assert_same(now, was)
    pair.zero()  # afterwards all is as it was
    pair.train(2)
    pair.check()


class BodyError(Exception):
    """What the body of a block raises; preamp itself never does."""


@with_masters
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("failing", [False, True])
def test_a_clip_of_zeros_in_place_of_earlier_gradients_drops_nothing(
    level: str, scale: float, failing: bool
) -> None:
    """They lie there where a block brought nothing new, and would stay zeros."""
    pair = Pair(level, loss_scale=scale)
    pair.backward(0, "a")
    with suppress(BodyError), preamp.scale_loss(pair.loss(1, "b"), pair.optimizer) as scaled:
        scaled.backward()
        if failing:
            raise BodyError
    clip_grad_norm_(pair.model.get_submodule("a").parameters(), 2.0**-12)
    with refused_at(level, "a clip of zeros"):
        pair.optimizer.step()


@with_masters
def test_the_norm_of_accumulated_gradients_is_not_that_of_the_last(level: str) -> None:
    """No scale is on them; clipped by it, their sum might be larger than allowed."""
    pair = Pair(level, loss_scale=1.0)
    pair.backward(0)
    pair.backward(1)
    clip_grad_norm_(pair.model.parameters(), math.inf)
    with refused_at(level, "a clip of the last gradient"):
        pair.optimizer.step()
