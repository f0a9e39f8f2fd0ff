# SPDX-License-Identifier: BSD-3-Clause
"""What one iteration may look like: blocks, accumulation, parameters that join, skips."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import F32_WEIGHTS, HALF_WEIGHTS, LEVEL_NAMES
from cases.models import Parts, batch, values
from cases.tolerances import assert_same
from kit.compare import differences, picture
from kit.loops import begin, scaled_backward
from kit.pair import Pair
from kit.refusals import refused

levels = pytest.mark.parametrize("level", LEVEL_NAMES)


X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])


# -- blocks ----------------------------------------------------------------------------------------


@levels
def test_a_loss_that_is_no_scalar(level: str) -> None:
    pair = Pair(level)
    x, coefficients = batch(0)
    with preamp.scale_loss(pair.model(x), pair.optimizer) as scaled:
        scaled.backward(coefficients)
    pair.theirs(0)
    pair.step()
    pair.check()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nested_blocks_of_one_optimizer_are_refused(level: str) -> None:
    pair = Pair(level)
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        with (
            refused("step_semantics", "a block in a block", pair.model, pair.optimizer),
            preamp.scale_loss(pair.loss(1), pair.optimizer),
        ):
            pass
        scaled.backward()
    pair.theirs(0)
    pair.check_grads()
    pair.step()
    pair.check()


INSIDE = "was called inside a scale_loss block. Gradients are unscaled when the block ends"


@pytest.mark.parametrize("level", [level for level in LEVEL_NAMES if level not in ("O0", "O4")])
@pytest.mark.parametrize(
    "call", [lambda o: o.step(), lambda o: preamp.clip_grad_norm_(o, 1.0)], ids=["step", "clip"]
)
def test_steps_and_clipping_inside_a_block_are_refused(
    level: str, call: Callable[[Any], Any]
) -> None:
    model = Parts()
    optimizer = begin(level, model, torch.optim.SGD(model.parameters(), lr=0.5), loss_scale=128.0)
    before = values(model)
    with preamp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(preamp.PreampStateError, match=re.escape(INSIDE)):
            call(optimizer)
    for param, old in zip(values(model), before, strict=True):
        assert_same(param, old)
    optimizer.step()


# -- which parameters take part --------------------------------------------------------------------


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [None, 128.0, "dynamic"])
def test_parameters_of_no_model_stay_as_they_are(level: str, dtype: Any, scale: Any) -> None:
    """A loss with weights, say. Their gradients keep the digits and the range of their dtype."""
    model = Parts()
    extra = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    assert "trained but in no model, left as they are: optimizers[0].param_groups[0][4]" in (
        preamp.engine_of(model).explain()
    )
    x, coefficients = batch(0)
    slope = torch.tensor([1 / 3, torch.finfo(dtype).smallest_normal], dtype=dtype)
    loss = (model(x) * coefficients).sum().to(dtype) + (extra * slope).sum()
    with preamp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is dtype
        scaled.backward()
    assert_same(extra.grad, slope)
    optimizer.step()
    assert_same(extra.detach(), torch.tensor([1.0, 2.0], dtype=dtype) - 0.5 * slope)


def replaced(model: Any) -> list[nn.Parameter]:
    torch.manual_seed(3)
    model.b = nn.Linear(3, 2)
    return list(model.b.parameters())


def in_an_earlier_layer(model: Any) -> list[nn.Parameter]:
    model.b.bias = nn.Parameter(torch.full((2,), 1 / 3))
    return [model.b.bias]


@pytest.mark.parametrize("change", [replaced, in_an_earlier_layer])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_layer_that_joins_later_trains_as_in_float32(level: str, change: Any) -> None:
    """Half models take it between two engines: what it has learnt stays exact."""
    pair = Pair(level, loss_scale=128.0)
    pair.train(0)
    given, plain = change(pair.model), change(pair.plain)
    if level in HALF_WEIGHTS:
        text = "^add_param_group was given 'b.*Call preamp.engine_of.optimizer..close()"
        before = picture(pair.model, pair.optimizer)
        with pytest.raises(preamp.PreampStateError, match=text):
            pair.optimizer.add_param_group({"params": given, "lr": 0.25})
        assert differences(before, picture(pair.model, pair.optimizer)) == []
        pair.engine.close()
    for param in given if level not in HALF_WEIGHTS else ():  # still scaled: it does not count
        param.grad = torch.ones_like(param)
    pair.optimizer.add_param_group({"params": iter(given), "lr": 0.25})
    if level in HALF_WEIGHTS:
        options = {"opt_level": level, "loss_scale": 128.0, "verbosity": 0}
        preamp.initialize(pair.model, pair.optimizer, **options)
        pair.engine = preamp.engine_of(pair.model)
    if level == "O3":  # has no masters to go on exactly with
        return
    pair.plain_optimizer.add_param_group({"params": plain, "lr": 0.25})
    for index in (1, 2, 3):
        pair.train(index)
        pair.check(f"after step {index}")


# -- sparse and complex gradients ------------------------------------------------------------------


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
            scaled_backward(_sparse_loss(model, step + part), optimizer)
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


@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
def test_complex_parameters_keep_their_imaginary_part(scale: float | str) -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j, -3 + 0.5j]))
    plain = nn.Parameter(weight.detach().clone())
    optimizer, other = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([plain], lr=0.5)
    preamp.initialize([], optimizer, opt_level="O1", verbosity=0, loss_scale=scale)
    scaled_backward(weight.abs().pow(2).sum(), optimizer)
    plain.abs().pow(2).sum().backward()
    norm = preamp.clip_grad_norm_(optimizer, 1.0)
    expected = torch.nn.utils.clip_grad_norm_([plain], 1.0)
    torch.testing.assert_close(norm, expected)
    optimizer.step()
    other.step()
    torch.testing.assert_close(weight.detach(), plain.detach())
