# SPDX-License-Identifier: BSD-3-Clause
"""The stand-alone scalers against their rule written as a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from preamp.fp16_utils import DynamicLossScaler, LossScaler


def holder(*grads: torch.Tensor | None) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


@pytest.mark.apex("0 apex.fp16_utils.LossScaler", "5.2 LossScaler")
def test_a_constant_scale_stays_and_sees_nothing() -> None:
    scaler = LossScaler(128.0)
    assert (scaler.cur_scale, scaler.loss_scale) == (128.0, 128.0)
    assert scaler.has_overflow(holder(torch.tensor([torch.inf, 0.0]))) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 128.0
    assert LossScaler().loss_scale == 1


@pytest.mark.apex("5.2 LossScaler")
@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(init_scale=4.0)])
def test_gradients_and_losses_are_scaled(scaler: LossScaler) -> None:
    x = torch.ones(2, requires_grad=True)
    assert scaler.scale_gradient(None, (x.detach(), None), None)[1] is None
    assert scaler.scale_gradient(None, (x.detach(),), None)[0].tolist() == [4.0, 4.0]
    loss = x.pow(2).sum() / 2
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert x.grad.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)


def test_half_losses_are_widened_first() -> None:
    x = torch.full((1,), 2.0, requires_grad=True)
    loss = (x * 1.0).half().sum()
    LossScaler(2.0**15).backward(loss)  # 2 * 2**15 is beyond float16
    assert x.grad.tolist() == [2.0**15]


@pytest.mark.apex("0 apex.fp16_utils.DynamicLossScaler", "5.2 DynamicLossScaler")
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    factor=st.sampled_from([2.0, 4.0]),
    window=st.integers(1, 7),
    init=st.sampled_from([1.0, 8.0, 2.0**32]),
)
def test_the_dynamic_rule(overflows: list[bool], factor: float, window: int, init: float) -> None:
    scaler = DynamicLossScaler(init_scale=init, scale_factor=factor, scale_window=window)
    scale, clean = init, 0
    for overflow in overflows:
        scaler.update_scale(overflow)
        clean = 0 if overflow else clean + 1
        if overflow:
            scale = max(scale / factor, 1)
        elif clean % window == 0:
            scale *= factor
        assert scaler.loss_scale == scale
    assert scaler.cur_iter == len(overflows)


@pytest.mark.apex("5.2 DynamicLossScaler")
def test_defaults() -> None:
    scaler = DynamicLossScaler()
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2**32, 2.0, 1000)
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (0, -1)


@pytest.mark.apex("5.2 has_overflow")
def test_overflow_is_found_in_any_gradient() -> None:
    scaler = DynamicLossScaler()
    finite = torch.tensor([3e38, 3e38])  # their float32 sum is infinite, they are not
    assert not scaler.has_overflow(holder(None, finite))
    assert not scaler.has_overflow(holder(None))
    assert scaler.has_overflow(holder(finite, torch.tensor([torch.nan, 0.0])))
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([torch.inf]))
    assert not DynamicLossScaler._has_inf_or_nan(finite)
