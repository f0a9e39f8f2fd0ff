# SPDX-License-Identifier: BSD-3-Clause
"""Wrapped functions as TorchScript, forward-mode derivatives and pickle find them."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from casting.probe import held
from preamp.casting.functions import install_function_casts, install_wide_half
from preamp.casting.registry import register_half_function


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


@pytest.mark.parametrize("function", [c_functions, python_functions, overloaded_functions])
def test_scripted_functions_see_the_originals(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.rand(4, 4)
    torch.testing.assert_close(torch.jit.script(function)(x), function(x))


def test_scripted_modules_see_the_originals() -> None:
    model, x = Layers(), torch.rand(4, 4)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_scripting_works_after_the_patches_are_gone(wrapped: None) -> None:
    handle = held(install_function_casts)
    handle.remove()
    assert torch.jit.script(c_functions)(torch.rand(4, 4)).shape == (8, 4)


FORWARD_MODE = """
import torch
from preamp.casting.functions import install_function_casts, install_wide_half
from preamp.core.undo import UndoStack
install_function_casts(UndoStack())
install_wide_half(torch.float16, UndoStack())
x = torch.rand(4)
print(torch.func.jvp(torch.sin, (x,), (x,))[1].equal(x * x.cos()))
print(torch.func.hessian(lambda x: (x**3).sum())(x).allclose(torch.diag(6 * x)))
"""


@pytest.mark.full
def test_forward_mode_derivatives_begin_under_patches() -> None:
    """In a process of its own: torch scripts the formulas once."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORWARD_MODE],
        capture_output=True,
        text=True,
        check=False,
    )
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


def test_registered_function_pickles() -> None:
    register_half_function(F, "silu")
    assert pickle.loads(pickle.dumps(F.silu)) is F.silu


def test_model_that_keeps_a_wrapped_function_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu"), torch.rand(2, 3, 8)
    assert hasattr(model.activation, "__wrapped__")
    file = io.BytesIO()

    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    assert loaded.activation is model.activation
    assert torch.equal(loaded(x), model(x))
