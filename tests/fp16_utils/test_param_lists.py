# SPDX-License-Identifier: BSD-3-Clause
"""Masters kept by the script, casts of whole models, and the stand-alone scalers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp16_utils.steps import net
from preamp.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
FLAT = pytest.mark.parametrize("flat", [False, True])


@HALVES
@FLAT
def test_training_by_hand_is_training_of_float32_masters(dtype: torch.dtype, flat: bool) -> None:
    """The oracle lets autograd do the casts: f(p.to(half)) with float32 p."""
    model = net(dtype)
    x = torch.randn(4, 3).to(dtype)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert all(master.dtype is torch.float32 and master.requires_grad for master in masters)
    oracle = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    ours = torch.optim.SGD(masters, lr=0.25, momentum=0.5)
    theirs = torch.optim.SGD([oracle[name] for name in trained], lr=0.25, momentum=0.5)
    for _ in range(3):
        model.zero_grad()
        model(x).float().pow(2).mean().backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        ours.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        theirs.zero_grad()
        halves = {name: value.to(dtype) for name, value in oracle.items()}
        torch.func.functional_call(model, halves, (x,)).float().pow(2).mean().backward()
        theirs.step()
        for name in trained:
            assert torch.equal(model.get_parameter(name), oracle[name].to(dtype))
    values = torch.cat([master.detach().reshape(-1) for master in masters])
    assert torch.equal(values, torch.cat([oracle[name].detach().reshape(-1) for name in trained]))


@FLAT
def test_lists_and_their_gradients(flat: bool) -> None:
    """Masters are copies even of float32 parameters; lists may be generators."""
    model = nn.Linear(2, 1, bias=False)
    _, masters = prep_param_lists(model, flat_master=flat)
    assert (masters[0].grad is not None) == flat  # of zeros
    assert masters[0].grad is None or not masters[0].grad.any()
    masters[0].detach().zero_()
    assert model.weight.abs().sum() > 0
    model.weight.grad = torch.full_like(model.weight, 3.0)
    model_grads_to_master_grads(model.parameters(), iter(masters), flat_master=flat)
    assert masters[0].grad is not None
    assert masters[0].grad.flatten().tolist() == [3.0, 3.0]
    masters[0].data.fill_(5.0)
    master_params_to_model_params(model.parameters(), iter(masters), flat_master=flat)
    assert model.weight.tolist() == [[5.0, 5.0]]
    embedding = nn.Embedding(4, 2, sparse=True).half()
    params, masters = prep_param_lists(embedding, flat_master=flat)
    embedding(torch.tensor([1, 1])).float().sum().backward()
    for _ in range(2):
        model_grads_to_master_grads(params, masters, flat_master=flat)
    grad = masters[0].grad
    dense = grad.to_dense() if grad.is_sparse else grad
    assert dense.reshape(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_a_missing_gradient_clears_the_masters() -> None:
    _, (flat,) = prep_param_lists(net(), flat_master=True)
    assert flat.shape == (3 * 2 + 2 + 2,)
    params, masters = prep_param_lists(net())
    for master in masters:
        master.grad = torch.ones_like(master)
    params[0].grad = torch.full_like(params[0], 3.0)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad.unique().tolist() == [3.0]
    assert [master.grad for master in masters[1:]] == [None] * (len(masters) - 1)


def test_helpers() -> None:
    for value in (torch.tensor([2.5]), np.float32(2.5), [2.5, 1.0]):
        assert to_python_float(value) == 2.5
    assert clip_grad_norm is torch.nn.utils.clip_grad_norm_
    ids, images = torch.tensor([257, 999]), torch.ones(2, dtype=torch.float64)
    got = tofp16()({"ids": ids, "images": images})
    assert got["ids"] is ids
    assert got["images"].dtype is torch.float16


# -- casts: which tensors, which batch norms, which inputs ------------------------------------


class Net(nn.Module):
    """Layers that conversions treat differently, and tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.bn = nn.BatchNorm1d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False)
        self.ln = nn.LayerNorm(3)
        self.own = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(self.plain_bn(self.bn(self.conv(x)))) * self.own


def dtypes(net: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in net.state_dict().items()}


EXPECTED = {
    "conv.weight": torch.float16,
    "bn.weight": torch.float32,
    "bn.running_mean": torch.float32,
    "bn.num_batches_tracked": torch.int64,
    "plain_bn.running_mean": torch.float16,
    "ln.weight": torch.float16,
    "own": torch.float16,
    "table": torch.float16,
    "count": torch.int64,
}


def from_half(net: nn.Module) -> nn.Module:
    return BN_convert_float(net.half())


@pytest.mark.parametrize(
    "convert", [lambda n: convert_network(n, torch.float16), network_to_half, from_half]
)
def test_a31_batch_norms_with_weights_stay_float32(convert: Callable[..., nn.Module]) -> None:
    """And are not rounded on the way, unless all was half before."""
    net = Net()
    params, exact = dict(net.named_parameters()), 1.0 + 2.0**-20
    with torch.no_grad():
        for value in (net.bn.weight, net.bn.running_var):
            value.fill_(exact)
    convert(net)
    found = dtypes(net)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert all(param is params[name] for name, param in net.named_parameters())
    kept = 1.0 if convert is from_half else exact
    assert net.bn.weight.tolist() == net.bn.running_var.tolist() == [kept] * 4


def test_network_to_half_is_a_sequential_that_runs_forward_and_backward() -> None:
    net = Net()
    half = network_to_half(net)
    assert isinstance(half, nn.Sequential)
    assert isinstance(half[0], tofp16)
    assert half[1] is net
    assert half.state_dict().keys() == {f"1.{name}" for name in net.state_dict()}
    out = half(torch.ones(2, 2, 3))
    assert out.dtype is torch.float16
    out.float().sum().backward()
    assert net.conv.weight.grad is not None


def test_convert_module_leaves_children_and_integers() -> None:
    net = Net()
    net.own.grad = torch.ones(3)
    convert_module(net, torch.bfloat16)
    found = dtypes(net)
    assert found["own"] is found["table"] is torch.bfloat16
    assert found["conv.weight"] is torch.float32
    assert found["count"] is torch.int64
    assert net.own.grad.dtype is torch.bfloat16


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 2)

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        assert scale.dtype is torch.float16
        return self.embedding(ids) * scale


def test_a31_fp16_model_leaves_integer_inputs() -> None:
    model = FP16Model(Lookup())
    ids = torch.tensor([2049, 3999])  # float16 has neither
    out = model(ids, scale=torch.ones(1))
    assert out.dtype is torch.float16
    assert torch.equal(out, model.network.embedding.weight[ids])


# -- the stand-alone scalers against their rule written as a loop -----------------------------


def holder(*grads: torch.Tensor | None) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


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
    y = torch.full((1,), 2.0**14, requires_grad=True)
    scaler.backward((y * 1.0).half().sum())  # four times as much is beyond float16
    assert y.grad.tolist() == [4.0]


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


def test_overflow_is_found_in_any_gradient() -> None:
    scaler = DynamicLossScaler()
    finite = torch.tensor([3e38, 3e38])  # their float32 sum is infinite, they are not
    assert not scaler.has_overflow(holder(None, finite))
    assert not scaler.has_overflow(holder(None))
    assert scaler.has_overflow(holder(finite, torch.tensor([torch.nan, 0.0])))
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([torch.inf]))
    assert not DynamicLossScaler._has_inf_or_nan(finite)
