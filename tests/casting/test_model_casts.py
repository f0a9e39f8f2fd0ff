# SPDX-License-Identifier: BSD-3-Clause
"""Whole models under casts: backward, checkpointing, composite layers, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from casting.probe import BF16, CPU, F16, F32, Probe, held
from preamp.casting.functions import install_function_casts
from preamp.casting.regions import attach_cast_region
from preamp.casting.thread_casts import push_thread_casts

pytestmark = pytest.mark.usefixtures("function_casts")


class _Observe(torch.autograd.Function):
    seen: list[bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _Observe.seen.append(torch.is_autocast_enabled("cpu"))
        return grads[0]


def test_backward_runs_without_casts() -> None:
    _Observe.seen = []
    handle = held(push_thread_casts, CPU, BF16)
    x = torch.ones(2, requires_grad=True)
    _Observe.apply(x).sum().backward()
    torch.autograd.grad(_Observe.apply(x).sum(), x)
    after = torch.is_autocast_enabled("cpu")
    handle.remove()

    assert _Observe.seen == [False, False]
    assert after


@pytest.mark.apex("B 9: activation checkpointing")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_model_has_the_gradients_of_the_plain_one(reentrant: bool) -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    x = torch.rand(2, 4, requires_grad=True)

    model(x).sum().backward()
    expected = model.linear.weight.grad
    model.linear.weight.grad = None
    checkpoint(lambda t: model(t) * 1.0, x, use_reentrant=reentrant).sum().backward()
    handle.remove()

    assert expected is not None
    torch.testing.assert_close(model.linear.weight.grad, expected, rtol=0, atol=0)


@pytest.mark.apex("4.1 recurrent layers, cells and packed sequences give half", "10 A-28")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("input_is_half", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention]
)
def test_composite_layers_give_half(
    layer: type[nn.Module], input_is_half: bool, dtype: torch.dtype
) -> None:
    model: nn.Module = layer(4, 4)
    held(attach_cast_region, model, CPU, dtype)
    x = torch.ones(3, 4) if "Cell" in layer.__name__ else torch.ones(2, 3, 4)
    x = x.to(dtype if input_is_half else F32).requires_grad_()

    output = model(x, x, x) if layer is nn.MultiheadAttention else model(x)
    output = output[0] if isinstance(output, tuple) else output
    output.float().sum().backward()

    assert output.dtype is dtype
    assert x.grad is not None
    assert x.grad.dtype is x.dtype
    assert all(p.grad is not None and p.grad.dtype is F32 for p in model.parameters())


@pytest.mark.apex("4.1 recurrent layers, cells and packed sequences give half")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_packed_sequences_and_evaluation(dtype: torch.dtype) -> None:
    lstm, encoder = nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    held(attach_cast_region, lstm, CPU, dtype)
    held(attach_cast_region, encoder.eval(), CPU, dtype)

    with torch.no_grad():
        sequence = lstm(packed)[0].data
        encoded = encoder(torch.ones(2, 3, 4))

    assert sequence.dtype is dtype
    assert encoded.isfinite().all()


def test_compiled_model_has_its_casts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    held(attach_cast_region, model, CPU, BF16)
    x = torch.ones(2, 4)
    compiled = torch.compile(model, backend="aot_eager")

    output = compiled(x)
    output.float().sum().backward()

    assert output.dtype is BF16
    torch.testing.assert_close(output, model(x), rtol=0, atol=0)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_transformer_evaluates_with_a_padding_mask(half: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    inputs, padded = torch.randn(2, 5, 8), torch.tensor([[False] * 4 + [True]] * 2)
    with torch.no_grad():
        expected = encoder(inputs, src_key_padding_mask=padded)[:, :4]
        before = torch.backends.mha.get_fastpath_enabled()
        handles = [held(install_function_casts), held(attach_cast_region, encoder, CPU, half)]
        found = encoder(inputs, src_key_padding_mask=padded)[:, :4]
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    assert torch.backends.mha.get_fastpath_enabled() == before
