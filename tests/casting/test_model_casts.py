# SPDX-License-Identifier: BSD-3-Clause
"""Whole models under casts: backward, checkpointing, composite layers, compilation."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from casting.probe import BF16, CPU, F16, F32, Probe, held, install_wide_half
from preamp.casting.functions import install_function_casts
from preamp.casting.regions import attach_cast_region
from preamp.casting.thread_casts import push_thread_casts

pytestmark = pytest.mark.usefixtures("function_casts")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_model_has_the_gradients_of_the_plain_one(reentrant: bool) -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    x = torch.rand(2, 4, requires_grad=True)

    model(x).sum().backward()
    expected = model.linear.weight.grad
    model.linear.weight.grad = None
    seen: list[torch.dtype] = []

    def call(t: torch.Tensor) -> torch.Tensor:
        seen.append(torch.mm(t, t.T).dtype)  # outside of the model, by the casts of its thread
        return model(t) * 1.0

    checkpoint(call, x, use_reentrant=reentrant).sum().backward()
    handle.remove()
    assert seen == [BF16, BF16]

    assert expected is not None
    torch.testing.assert_close(model.linear.weight.grad, expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_packed_sequences(dtype: torch.dtype) -> None:
    lstm = nn.LSTM(4, 4)
    held(attach_cast_region, lstm, CPU, dtype)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    assert lstm(packed)[0].data.dtype is dtype


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


# -- functions as TorchScript, forward-mode derivatives and pickle find them ------------------


@pytest.fixture(autouse=True)
def wrapped() -> Iterator[None]:
    handles = [held(install_function_casts), held(install_wide_half, torch.float16)]
    yield
    for handle in handles:
        handle.remove()


def c_functions(x: torch.Tensor) -> torch.Tensor:
    y = torch.exp(x) + torch.matmul(x, x) + F.gelu(x) + F.linear(x, x)
    return torch.cat([y, torch.einsum("ij,jk->ik", [x, x])]) + torch.linalg.norm(x)


def python_functions(x: torch.Tensor) -> torch.Tensor:
    y = F.softmax(x, -1) + F.layer_norm(x, [4]) + F.normalize(x)
    return y + F.mse_loss(x, y) + torch.cdist(x, x)


def overloaded_functions(x: torch.Tensor) -> torch.Tensor:
    larger = F.interpolate(x[None], scale_factor=2.0)
    return larger + torch.norm(x) + torch.tensordot(x, x)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.softmax = nn.Softmax(-1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.softmax(self.lstm(x)[0]), x)


@pytest.mark.parametrize(
    "made",
    [c_functions, python_functions, overloaded_functions, Layers()],
    ids=["C", "Python", "overloaded", "module"],
)
def test_scripted_functions_and_modules_see_the_originals(made: Any) -> None:
    x = torch.rand(4, 4)
    torch.testing.assert_close(torch.jit.script(made)(x), made(x))


def test_scripting_works_after_the_patches_are_gone(wrapped: None) -> None:
    held(install_function_casts).remove()
    assert torch.jit.script(c_functions)(torch.rand(4, 4)).shape == (8, 4)


FORWARD_MODE = """
import torch
from preamp.casting.functions import WIDE_HALF, install_function_casts
from preamp.core.undo import UndoStack
install_function_casts(UndoStack())
WIDE_HALF[torch.float16].acquire(UndoStack())
x = torch.rand(4)
print(torch.func.jvp(torch.sin, (x,), (x,))[1].equal(x * x.cos()))
print(torch.func.hessian(lambda x: (x**3).sum())(x).allclose(torch.diag(6 * x)))
"""


@pytest.mark.full
def test_forward_mode_derivatives_begin_under_patches() -> None:
    """In a process of its own: torch scripts the formulas once."""
    call = [sys.executable, "-W", "ignore", "-c", FORWARD_MODE]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["True", "True"], run.stderr


NAMES = ["torch.exp", "torch.norm", "torch.einsum", "torch.nn.functional.gelu"]
NAMES += ["torch.nn.functional.softmax", "torch.nn.functional.linear", "torch.linalg.norm"]
NAMES += ["torch.Tensor.exp", "torch.Tensor.__add__", "torch.autograd.backward"]


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", NAMES)
def test_wrapped_functions_pickle_as_what_they_are_found_as(name: str, protocol: int) -> None:
    function: Any = torch
    for part in name.split(".")[1:]:
        function = getattr(function, part)
    text = pickle.dumps(function, protocol)
    assert pickle.loads(text) is function
    assert b"preamp" not in text


def test_compiled_functions_outside_of_models_have_the_casts_of_their_thread() -> None:
    compiled = torch.compile(lambda x: torch.mm(x, x).exp(), backend="eager")
    handle = held(push_thread_casts, CPU, BF16)
    x = torch.rand(2, 2)
    inside, expected = compiled(x), torch.mm(x, x).exp()
    handle.remove()
    assert torch.equal(inside, expected)
    assert not torch.equal(compiled(x), expected)  # in float32 throughout
