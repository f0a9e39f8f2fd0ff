# SPDX-License-Identifier: BSD-3-Clause
"""Casts of whole models: which tensors, which batch norms, which inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from preamp.fp16_utils import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    network_to_half,
    tofp16,
)


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


@pytest.mark.apex("0 apex.fp16_utils.tofp16", "5.1 tofp16")
def test_tofp16_casts_what_is_floating() -> None:
    ids, images = torch.tensor([257, 999]), torch.ones(2, dtype=torch.float64)
    got = tofp16()({"ids": ids, "images": images})
    assert got["ids"] is ids
    assert got["images"].dtype is torch.float16


@pytest.mark.apex("0 apex.fp16_utils.convert_network", "5.1 convert_network")
@pytest.mark.parametrize("convert", [lambda n: convert_network(n, torch.float16), network_to_half])
def test_batch_norms_with_weights_stay_float32(convert: Callable[..., nn.Module]) -> None:
    net = Net()
    params = dict(net.named_parameters())
    convert(net)
    found = dtypes(net)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert all(param is params[name] for name, param in net.named_parameters())


@pytest.mark.apex("0 apex.fp16_utils.network_to_half", "5.1 network_to_half")
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


@pytest.mark.apex("5.1 network_to_half", "10 A-31")
def test_a31_batch_norms_are_not_rounded_on_the_way() -> None:
    net = Net()
    with torch.no_grad():
        for value in (net.bn.weight, net.bn.running_var):
            value.fill_(1.0 + 2.0**-20)
    network_to_half(net)
    assert net.bn.weight.tolist() == [1.0 + 2.0**-20] * 4
    assert net.bn.running_var.tolist() == [1.0 + 2.0**-20] * 4


@pytest.mark.apex("0 apex.fp16_utils.BN_convert_float", "5.1 BN_convert_float")
def test_bn_convert_float_brings_back_only_batch_norms_with_weights() -> None:
    net = Net().half()
    assert BN_convert_float(net) is net
    found = dtypes(net)
    assert {name: found[name] for name in EXPECTED} == EXPECTED


@pytest.mark.apex("0 apex.fp16_utils.convert_module", "5.1 convert_module")
def test_convert_module_leaves_children_and_integers() -> None:
    net = Net()
    net.own.grad = torch.ones(3)
    convert_module(net, torch.bfloat16)
    found = dtypes(net)
    assert found["own"] is found["table"] is torch.bfloat16
    assert found["conv.weight"] is torch.float32
    assert found["count"] is torch.int64
    assert net.own.grad.dtype is torch.bfloat16


@pytest.mark.apex("5.1 convert_network")
def test_convert_network_keeps_recurrent_layers_working() -> None:
    lstm = nn.LSTM(3, 4)
    reference = copy.deepcopy(lstm)
    x = torch.ones(2, 1, 3)
    out, _ = convert_network(lstm, torch.bfloat16)(x.bfloat16())
    torch.testing.assert_close(out.float(), reference(x)[0], rtol=0.05, atol=0.02)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 2)

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        assert scale.dtype is torch.float16
        return self.embedding(ids) * scale


@pytest.mark.apex("0 apex.fp16_utils.FP16Model", "5.1 FP16Model", "10 A-31")
def test_a31_fp16_model_leaves_integer_inputs() -> None:
    model = FP16Model(Lookup())
    ids = torch.tensor([2049, 3999])  # float16 has neither
    out = model(ids, scale=torch.ones(1))
    assert out.dtype is torch.float16
    assert torch.equal(out, model.network.embedding.weight[ids])
