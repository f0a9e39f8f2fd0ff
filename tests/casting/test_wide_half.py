# SPDX-License-Identifier: BSD-3-Clause
"""float16 products on the CPU, run wide: contract, error budget, composition with casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from casting.op_examples import example
from preamp.casting.functions import install_function_casts, install_wide_half, namespace_owner
from preamp.casting.op_lists import OpRow
from preamp.casting.regions import attach_cast_region
from preamp.core.pytree import map_tensors
from preamp.kernels.wide_half import WIDE_FUNCTIONS, cpu_lacks_fp16_matmul

F16, F32 = torch.float16, torch.float32


def _first(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def _run(namespace: str, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The function's result and gradients for float16 values held in ``dtype``."""
    row = OpRow(namespace=namespace, name=name, rule="half", reason="")  # pyright: ignore[reportArgumentType]
    leaves: list[torch.Tensor] = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.to(F16).to(dtype).detach().requires_grad_())
        return leaves[-1]

    args = tuple(map_tensors(convert, arg) for arg in example(row))
    result = _first(getattr(namespace_owner(namespace), name)(*args))
    result.sum().backward()
    return result.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.filterwarnings("ignore")  # chain_matmul is deprecated
@pytest.mark.parametrize(("namespace", "name"), WIDE_FUNCTIONS)
def test_error_is_at_most_that_of_native_half(namespace: str, name: str) -> None:
    oracle, oracle_grads = _run(namespace, name, torch.float64)
    native, _ = _run(namespace, name, F16)
    handle = install_wide_half()
    ours, grads = _run(namespace, name, F16)
    handle.remove()

    assert ours.dtype is F16
    assert all(grad.dtype is F16 for grad in grads)
    error = (ours.double() - oracle).abs().max()
    one_rounding = oracle.abs().max() * 2.0**-11
    assert error <= max((native.double() - oracle).abs().max(), one_rounding) * 1.01
    for grad, expected in zip(grads, oracle_grads, strict=True):
        # The gradient passes two roundings: that of the result before, and its own.
        tolerance = expected.abs().max().item() * 2.0**-9 + 1e-6
        torch.testing.assert_close(grad.double(), expected, rtol=0, atol=tolerance)


def test_accumulates_in_float32() -> None:
    ones, weight = torch.ones(1, 4096, dtype=F16), torch.ones(1, 4096, dtype=F16)
    weight[0, 1:] = 2.0**-12
    handle = install_wide_half()
    result = F.linear(ones, weight)
    handle.remove()

    # Added one by one in float16, every small term would vanish beside 1.
    assert result.item() == torch.tensor(1 + 4095 * 2.0**-12).to(F16).item()


@pytest.mark.parametrize("wide_first", [True, False])
def test_autocast_inputs_are_rounded_to_float16_first(wide_first: bool) -> None:
    installs = [install_wide_half, install_function_casts]
    handles = [install() for install in (installs if wide_first else installs[::-1])]
    model = torch.nn.Linear(8, 8)
    attach_cast_region(model, frozenset({"cpu"}), F16)
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))

    output = model(x)
    output.float().sum().backward()
    for handle in handles:
        handle.remove()

    weight, bias = model.weight.detach().half(), model.bias.detach().half()
    expected = F.linear(x.half().float(), weight.float(), bias.float()).half()
    assert torch.equal(output, expected)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is F32


def test_other_dtypes_pass_through() -> None:
    handle = install_wide_half()
    results = [
        torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)).dtype
        for dtype in (torch.bfloat16, F32, torch.float64, torch.int64)
    ]
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.ones(2, 2, dtype=F16), torch.ones(2, 2))
    handle.remove()

    assert results == [torch.bfloat16, F32, torch.float64, torch.int64]


@pytest.mark.filterwarnings("ignore")  # chain_matmul is deprecated
@pytest.mark.parametrize(("namespace", "name"), WIDE_FUNCTIONS)
def test_dtypes_under_the_users_own_autocast_stay(namespace: str, name: str) -> None:
    """A program may use torch.autocast beside an engine; its results keep their dtypes."""
    row = OpRow(namespace=namespace, name=name, rule="half", reason="")  # pyright: ignore[reportArgumentType]

    def dtype() -> torch.dtype | None:
        with torch.autocast("cpu", F16):
            try:
                return _first(getattr(namespace_owner(namespace), name)(*example(row))).dtype
            except RuntimeError:  # oneDNN has no float16 LSTM on some CPUs
                return None

    before = dtype()
    handle = install_wide_half()
    beside = dtype()
    handle.remove()

    assert beside is before


def test_probe_answers_once() -> None:
    assert cpu_lacks_fp16_matmul() is cpu_lacks_fp16_matmul()
