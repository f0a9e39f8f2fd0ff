# SPDX-License-Identifier: BSD-3-Clause
"""What one iteration may look like: accumulation, delays, exceptions, frozen parts, skips."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import EXACT, F32_WEIGHTS, LEVEL_NAMES
from cases.models import Damage, Exact, Parts, batch, loss_of, values
from cases.optimizers import clone_state
from cases.pair import Pair, adam, sgd
from cases.tolerances import assert_same
from preamp.optimizers import FusedSGD

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
dynamic = pytest.mark.parametrize("level", LEVEL_NAMES)
"""All levels, for tests that ask for ``loss_scale="dynamic"``."""


# -- accumulation and delays ------------------------------------------------------------------


@dynamic
def test_delayed_gradients_survive_a_change_of_scale(level: str) -> None:
    pair = Pair(level, loss_scale="dynamic")
    pair.backward(0, delay_unscale=True)
    pair.engine.scaler(0).set_scale(2.0**10)
    pair.backward(1)
    pair.check_grads()
    pair.step()
    pair.check()


@dynamic
def test_delayed_overflow_belongs_to_its_own_scaler(level: str) -> None:
    """The backward of another loss settles what was delayed; the overflow stays loss 0's."""
    pair = Pair(level, loss_scale="dynamic", num_losses=2)
    with preamp.scale_loss(pair.loss(0) * math.inf, pair.optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    pair.ours(1, loss_id=1)
    pair.optimizer.step()
    assert pair.engine.last_step_skipped
    pair.zero()
    for loss_id in (0, 1):
        pair.backward(2 + loss_id, loss_id=loss_id)
    assert [pair.engine.loss_scale(i) for i in (0, 1)] == [2.0**15, 2.0**16]
    pair.step()
    assert not pair.engine.last_step_skipped
    pair.check()


@pytest.mark.apex("10 A-26", "2.7 delay_overflow_check=True")
@dynamic
@pytest.mark.parametrize("then", ["checked", "delayed"])
def test_delay_overflow_check_keeps_the_overflow(level: str, then: str) -> None:
    """A-26: Apex reset the flag at the next exit, and the infinite gradients were applied."""
    pair = Pair(level, loss_scale="dynamic")
    loss = pair.loss(0) * math.inf
    with preamp.scale_loss(loss, pair.optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    assert pair.engine.loss_scale() == 2.0**16
    pair.ours(1, delay_overflow_check=then == "delayed")
    assert pair.engine.loss_scale() == (2.0**16 if then == "delayed" else 2.0**15)
    pair.optimizer.step()
    assert pair.engine.last_step_skipped
    pair.zero()
    pair.train(2)
    assert not pair.engine.last_step_skipped
    assert pair.engine.loss_scale() == 2.0**15
    pair.check()


@pytest.mark.apex("2.1 several backwards in the block")
@levels
def test_several_backwards_in_one_body(level: str) -> None:
    pair = Pair(level)
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        scaled.backward(retain_graph=True)
        scaled.backward()
    pair.theirs(0)
    pair.theirs(0)
    pair.check_grads()
    pair.step()
    pair.check()


@pytest.mark.apex("2.1 a loss that is no scalar")
@levels
def test_a_loss_that_is_no_scalar(level: str) -> None:
    pair = Pair(level)
    x, coefficients = batch(0)
    with preamp.scale_loss(pair.model(x), pair.optimizer) as scaled:
        scaled.backward(coefficients)
    pair.theirs(0)
    pair.step()
    pair.check()


@pytest.mark.apex(
    "10 A-21",
    "2.1 tuples and other collections of optimizers",
    "B 16: several optimizers in one scale_loss",
    "B 18: a tuple of optimizers",
)
@pytest.mark.parametrize("container", [tuple, list, iter, set], ids=lambda kind: kind.__name__)
@levels
def test_any_collection_of_optimizers(level: str, container: Callable[[Any], Any]) -> None:
    """A-21: a tuple meant that earlier gradients were divided again."""
    models = [Exact(0), Exact(1)]
    plain = [copy.deepcopy(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    preamp.initialize(models, optimizers, opt_level=level, loss_scale=4.0, verbosity=0)
    for index in range(2):
        with preamp.scale_loss(loss_of(models, index), container(optimizers)) as scaled:
            scaled.backward()
        with preamp.disable_casts():
            loss_of(plain, index).backward()
    for model, oracle, optimizer in zip(models, plain, optimizers, strict=True):
        for ours, theirs in zip(preamp.master_params(optimizer), oracle.parameters(), strict=True):
            assert ours.grad is not None
            assert_same(ours.grad.float(), theirs.grad)
        optimizer.step()
        assert model.linear.weight.isfinite().all()


# -- exceptions ------------------------------------------------------------------------------


class BodyError(Exception):
    """Raised by the bodies below."""


def _fail_in_body(pair: Pair, *, after_backward: bool) -> None:
    with preamp.scale_loss(pair.loss(7), pair.optimizer) as scaled:
        if after_backward:
            scaled.backward()
        raise BodyError


def _start_from_rounded(pair: Pair) -> None:
    """A master made after initialize starts from the half weight: there is nothing else."""
    with torch.no_grad():
        for ours, theirs in zip(
            pair.model.get_submodule("b").parameters(),
            pair.plain.get_submodule("b").parameters(),
            strict=True,
        ):
            theirs.copy_(ours)


# -- which parameters take part --------------------------------------------------------------


@levels
@pytest.mark.parametrize("fails", [False, True])
def test_a_part_unused_with_the_zeroing_an_optimizer_was_built_for(level: str, fails: bool) -> None:
    """FusedSGD zeroes gradients unless it is told otherwise, and its momentum goes on."""
    build = partial(FusedSGD, lr=0.25, momentum=0.5)
    pair = Pair(level, build, loss_scale="dynamic")
    for index, parts in enumerate(["ab", "a", "b", "ab"]):
        if fails:
            with pytest.raises(BodyError):
                _fail_in_body(pair, after_backward=True)
        pair.backward(index, parts)
        pair.step()
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.check(f"step {index}")


@levels
def test_parameters_without_a_model_are_trained_and_named(level: str) -> None:
    """A loss with weights, say."""
    model, plain = Parts(), Parts()
    weights, plain_weights = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    dtype = torch.float16 if level == "O3" else torch.float32
    plain.to(dtype)
    optimizer = sgd([*model.parameters(), weights])
    oracle = sgd([*plain.parameters(), plain_weights])
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert weights.dtype is torch.float32
    assert "trained but in no model, left as they are: optimizers[0].param_groups[0][4]" in (
        preamp.engine_of(model).explain()
    )
    for index in range(3):
        x, coefficients = batch(index)
        # Only the weights' own gradient may depend on a parameter: all else stays exact.
        with preamp.scale_loss(
            (model(x) * coefficients).sum() + (weights * coefficients).sum(), optimizer
        ) as scaled:
            scaled.backward()
        with preamp.disable_casts():
            output = plain(x.to(dtype)).float()
            ((output * coefficients).sum() + (plain_weights * coefficients).sum()).backward()
        for each in (optimizer, oracle):
            with preamp.disable_casts():
                each.step()
            each.zero_grad()
        assert_same(weights.detach(), plain_weights.detach())
        for ours, theirs in zip(values(optimizer), values(oracle), strict=True):
            assert_same(ours, theirs)


@pytest.mark.apex("1.1 float64 parameters in an optimizer")
@pytest.mark.parametrize("level", EXACT)
@pytest.mark.parametrize("scale", [None, 128.0, "dynamic"])
def test_float64_parameters_in_the_optimizer(level: str, scale: Any) -> None:
    model = Parts()
    extra = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    x, coefficients = batch(0)
    third = torch.tensor([1 / 3, 1e-60], dtype=torch.float64)
    loss = (model(x) * coefficients).sum().double() + (extra * third).sum()
    with preamp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float64
        scaled.backward()
    assert_same(extra.grad, third)
    optimizer.step()
    assert_same(extra.detach(), torch.tensor([1.0, 2.0], dtype=torch.float64) - 0.1 * third)


def test_parameters_of_three_dtypes_in_one_optimizer() -> None:
    model = Exact()
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    brain = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([*model.parameters(), wide, brain], lr=0.1, foreach=True)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    dtypes = [p.dtype for p in preamp.master_params(optimizer)]
    assert dtypes == [torch.float32] * 4 + [torch.float64, torch.float32]
    for index in range(2):
        loss = loss_of([model], index) + (wide.float() + brain.float()).sum() * 2.0**-8
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.linear.weight.dtype is torch.float16
    assert model.norm.weight.dtype is torch.float32
    assert brain.dtype is torch.bfloat16
    torch.testing.assert_close(wide.detach(), torch.full_like(wide, 0.8), rtol=0, atol=1e-5)
    assert_same(brain.detach(), torch.full((2,), 0.8, dtype=torch.bfloat16))


@pytest.mark.apex("1.7 optimizer state follows its parameters")
@levels
@pytest.mark.parametrize("build", [sgd, adam], ids=["sgd", "adam"])
def test_state_from_before_initialize_is_kept(level: str, build: Any) -> None:
    """An optimizer that has stepped already brings its momentum along, cast to its parameters."""
    model, plain = Parts(), Parts()
    optimizer, oracle = build(model.parameters()), build(plain.parameters())
    for own, its in ((model, optimizer), (plain, oracle)):
        for index in range(2):
            loss_of([own], index).backward()
            its.step()
            its.zero_grad()
    if level == "O3":
        plain.half()
        oracle.load_state_dict(oracle.state_dict())
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for index in (2, 3):
        _backward(loss_of([model], index), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with preamp.disable_casts():
            loss_of([plain], index).backward()
            oracle.step()
        oracle.zero_grad()
        for ours, theirs in zip(values(optimizer), values(oracle), strict=True):
            assert_same(ours, theirs, f"step {index}")
    state, wanted = clone_state(optimizer), clone_state(oracle)
    assert len(state) == len(wanted)
    for key, value in wanted.items():
        assert_same(state[key], value, key)


# -- add_param_group -------------------------------------------------------------------------


@pytest.mark.apex("2.6 add_param_group")
@levels
@pytest.mark.parametrize("when", ["before any step", "after a step"])
@pytest.mark.parametrize("form", ["list", "generator", "one"])
@pytest.mark.parametrize("build", [sgd, adam], ids=["sgd", "adam"])
def test_add_param_group(level: str, when: str, form: str, build: Any) -> None:
    def build_a(params: Any) -> torch.optim.Optimizer:
        return build(list(params)[:2])  # layer a

    pair = Pair(level, build_a)
    _start_from_rounded(pair)
    if when == "after a step":
        pair.train(0)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        layer = model.get_submodule("b")
        params: Any = {
            "list": list(layer.parameters()),
            "generator": layer.parameters(),
            "one": layer.weight,
        }[form]
        optimizer.add_param_group({"params": params, "lr": 0.25})
        layer.zero_grad()
    if form == "one":
        pair.plain.get_parameter("b.bias").requires_grad_(False)
        pair.model.get_parameter("b.bias").requires_grad_(False)
    for index in (1, 2):
        pair.train(index)
        pair.check()
    assert pair.optimizer.param_groups[1]["lr"] == 0.25


# -- skipped steps ---------------------------------------------------------------------------


@pytest.mark.apex("2.1 one update of the scale per block, not per step")
@dynamic
def test_the_scale_grows_after_enough_clean_backwards(level: str) -> None:
    pair = Pair(level, loss_scale="dynamic")
    scaler = pair.engine.scaler(0)
    rule: Any = scaler.rule
    assert rule.growth_interval == 2000
    scaler.rule = type(rule)(growth_interval=3)
    scaler.set_scale(2.0**8)
    scales = []
    for index in range(7):
        if index == 1:
            pair.overflow()
            pair.optimizer.step()
            pair.zero()
        else:
            pair.train(index)
        scales.append(pair.engine.loss_scale())
    assert scales == [2.0**n for n in (8, 7, 7, 7, 8, 8, 8)]
    pair.check()


def test_min_loss_scale_is_a_floor_that_training_goes_on_at() -> None:
    pair = Pair("O2", min_loss_scale=2.0**15)
    for _ in range(5):
        pair.overflow()
        pair.optimizer.step()
        pair.zero()
    assert pair.engine.loss_scale() == 2.0**15
    pair.train(0)
    pair.check()


# -- when scaling cannot go on ---------------------------------------------------------------


def _skip(pair: Pair) -> None:
    pair.ours(0)
    pair.optimizer.step()


@pytest.mark.apex("2.6 overflows without end")
@dynamic
def test_too_many_skips_in_a_row_name_the_parameter(level: str) -> None:
    pair = Pair(level, loss_scale="dynamic", max_consecutive_skips=3)
    damage = Damage(pair.model.get_parameter("b.weight"), math.nan)
    for _ in range(2):
        damage.armed = True
        _skip(pair)
        pair.zero()
    pair.train(1)  # the count starts anew
    for _ in range(2):
        damage.armed = True
        _skip(pair)
        pair.zero()
    damage.armed = True
    text = (
        "3 optimizer steps in a row skipped; the loss is finite but gradients overflow in "
        "'b.weight' at loss scale 4096.0 (loss 0). Dynamic loss scaling needs a clean backward "
        "now and then. Lower the learning rate or clip, run that layer in float32, or train in "
        "bfloat16 (O4, O5); for weights pre-trained in bfloat16, float16 is often too narrow."
    )
    with pytest.raises(preamp.LossScaleError, match=f"^{re.escape(text)}$"):
        _skip(pair)
    pair.check()


@pytest.mark.apex("1.5 min_loss_scale", "2.6 overflows without end")
def test_the_scale_falling_to_its_minimum_is_an_error() -> None:
    pair = Pair("O2", max_consecutive_skips=None)
    pair.engine.scaler(0).set_scale(2.0**-22)
    damage = Damage(pair.model.get_parameter("a.bias"), math.inf)
    damage.armed = True
    _skip(pair)
    pair.zero()
    damage.armed = True
    text = "The loss scale fell to its minimum, 5.960464477539063e-08 (2**-24); the loss is finite"
    with pytest.raises(preamp.LossScaleError, match=f"^{re.escape(text)}.*'a.bias'"):
        _skip(pair)
    pair.check()


def test_an_infinite_loss_with_finite_gradients_is_not_the_cause() -> None:
    pair = Pair("O2")
    with preamp.scale_loss(pair.loss(0) + math.inf, pair.optimizer) as scaled:
        scaled.backward()
    assert pair.engine.loss_scale() == 2.0**16
    Damage(pair.model.get_parameter("a.bias"), math.inf).armed = True
    _skip(pair)
    (cause,) = pair.engine.overflow_causes
    assert cause.parameters == ("a.bias",)
    assert cause.loss_was_finite


# -- sparse gradients ------------------------------------------------------------------------


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.embedding(index)


def _sparse_loss(model: nn.Module, step: int) -> torch.Tensor:
    index = torch.tensor([step, 1, 1, 4])
    return (model(index).float() * torch.tensor([1.0, 2.0]) * 2.0**-8).sum()


@pytest.mark.apex("2.1 sparse gradients")
@pytest.mark.parametrize("level", F32_WEIGHTS)
@pytest.mark.parametrize("scale", ["dynamic", 128.0, None])
@pytest.mark.parametrize(
    "build",
    [
        lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        lambda params: torch.optim.SparseAdam(params, lr=0.5),
    ],
    ids=["sgd", "sparse_adam"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients(level: str, scale: Any, build: Any, accumulate: int) -> None:
    model = Sparse()
    plain = copy.deepcopy(model)
    optimizer, oracle = build(list(model.parameters())), build(list(plain.parameters()))
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    for step in range(3):
        for part in range(accumulate):
            with preamp.scale_loss(_sparse_loss(model, step + part), optimizer) as scaled:
                scaled.backward()
            _sparse_loss(plain, step + part).backward()
        assert model.embedding.weight.grad is not None
        assert model.embedding.weight.grad.is_sparse
        # A row used twice is one sum for us and may be two updates, each rounded, for torch.
        plain.embedding.weight.grad = plain.embedding.weight.grad.coalesce()
        if scale is None:
            model.embedding.weight.grad = model.embedding.weight.grad.coalesce()
        with preamp.disable_casts():
            oracle.step()
        optimizer.step()
        optimizer.zero_grad()
        oracle.zero_grad()
        assert_same(model.embedding.weight.detach(), plain.embedding.weight.detach())


@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_a_sparse_overflow_is_skipped(level: str) -> None:
    model = Sparse()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = values(model)
    with preamp.scale_loss(_sparse_loss(model, 0) * math.inf, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert preamp.engine_of(model).last_step_skipped
    assert_same(values(model)[0], before[0])


def _backward(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


# -- blocks that do not end well -------------------------------------------------------------


@pytest.mark.apex("2.1 a block inside another of the same optimizer")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nested_blocks_of_one_optimizer_are_refused(level: str) -> None:
    pair = Pair(level)
    text = "scale_loss was entered for an SGD that is in a scale_loss block already. "
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        with (
            pytest.raises(preamp.PreampStateError, match=f"^{re.escape(text)}"),
            preamp.scale_loss(pair.loss(1), pair.optimizer),
        ):
            pass
        scaled.backward()
    pair.theirs(0)
    pair.check_grads()
    pair.step()
    pair.check()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_asks_the_device_once(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(level)
    pair.ours(0)
    asked: list[object] = []
    item = torch.Tensor.item

    def count(tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.float32 and tensor.dim() == 0:
            asked.append(tensor)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", count)
    pair.optimizer.step()
    assert len(asked) == 1


@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
def test_complex_parameters_keep_their_imaginary_part(scale: float | str) -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j, -3 + 0.5j]))
    plain = nn.Parameter(weight.detach().clone())
    optimizer, other = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([plain], lr=0.5)
    preamp.initialize([], optimizer, opt_level="O1", verbosity=0, loss_scale=scale)
    with preamp.scale_loss(weight.abs().pow(2).sum(), optimizer) as scaled:
        scaled.backward()
    plain.abs().pow(2).sum().backward()
    norm = preamp.clip_grad_norm_(optimizer, 1.0)
    expected = torch.nn.utils.clip_grad_norm_([plain], 1.0)
    torch.testing.assert_close(norm, expected)
    optimizer.step()
    other.step()
    torch.testing.assert_close(weight.detach(), plain.detach())
