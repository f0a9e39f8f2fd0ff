# SPDX-License-Identifier: BSD-3-Clause
"""Half products on the CPU, run wide: contract, error budget, composition with casts."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from casting.op_examples import example
from casting.probe import BF16, F16, F32, held, install_wide_half
from preamp.casting.functions import (
    install_function_casts,
    install_wide_where_slow,
    namespace_owner,
)
from preamp.casting.op_lists import OpRow
from preamp.casting.regions import attach_cast_region
from preamp.core.pytree import map_tensors
from preamp.core.torch_private.observe import ObservedOps
from preamp.kernels.wide_half import WIDE_FUNCTIONS, cpu_lacks_matmul, native_products

either_half = pytest.mark.parametrize("half", [F16, BF16], ids=str)


def _first(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def _run(
    namespace: str, name: str, half: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The function's result and gradients for values of ``half`` held in ``dtype``."""
    row = OpRow(namespace=namespace, name=name, rule="half", reason="")  # pyright: ignore[reportArgumentType]
    leaves: list[torch.Tensor] = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.to(half).to(dtype).detach().requires_grad_())
        return leaves[-1]

    args = tuple(map_tensors(convert, arg) for arg in example(row))
    result = _first(getattr(namespace_owner(namespace), name)(*args))
    result.sum().backward()
    return result.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.filterwarnings("ignore")  # chain_matmul is deprecated
@either_half
@pytest.mark.parametrize(("namespace", "name"), WIDE_FUNCTIONS)
def test_error_is_at_most_that_of_native_half(namespace: str, name: str, half: torch.dtype) -> None:
    oracle, oracle_grads = _run(namespace, name, half, torch.float64)
    native, _ = _run(namespace, name, half, half)
    handle = held(install_wide_half, half)
    ours, grads = _run(namespace, name, half, half)
    handle.remove()
    assert ours.dtype is half
    assert all(grad.dtype is half for grad in grads)
    error = (ours.double() - oracle).abs().max()
    one_rounding = oracle.abs().max() * torch.finfo(half).eps / 2
    assert error <= max((native.double() - oracle).abs().max(), one_rounding) * 1.01
    for grad, expected in zip(grads, oracle_grads, strict=True):
        # The gradient passes two roundings: that of the result before, and its own.
        tolerance = expected.abs().max().item() * 2 * torch.finfo(half).eps + 1e-6
        torch.testing.assert_close(grad.double(), expected, rtol=0, atol=tolerance)


@either_half
def test_accumulates_in_float32(half: torch.dtype) -> None:
    ones, weight = torch.ones(1, 4096, dtype=half), torch.ones(1, 4096, dtype=half)
    weight[0, 1:] = 2.0**-12
    handle = held(install_wide_half, half)
    result = F.linear(ones, weight)
    handle.remove()
    # Added one by one in half, every small term would vanish beside 1.
    assert result.item() == torch.tensor(1 + 4095 * 2.0**-12).to(half).item()


@either_half
@pytest.mark.parametrize("wide_first", [True, False])
def test_autocast_inputs_are_rounded_first(wide_first: bool, half: torch.dtype) -> None:
    installs = [partial(held, install_wide_half, half), partial(held, install_function_casts)]
    handles = [install() for install in (installs if wide_first else installs[::-1])]
    model = torch.nn.Linear(8, 8)
    held(attach_cast_region, model, frozenset({"cpu"}), half)
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    output = model(x)
    output.float().sum().backward()
    for handle in handles:
        handle.remove()
    weight, bias = model.weight.detach().to(half), model.bias.detach().to(half)
    expected = F.linear(x.to(half).float(), weight.float(), bias.float()).to(half)
    assert torch.equal(output, expected)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is F32


@either_half
def test_products_can_be_torchs_own(half: torch.dtype) -> None:
    """An estimate counts no copies of weights then that a device with units does not make."""
    ones = torch.ones(2, 2, dtype=half)
    seen: list[torch.dtype] = []
    handle = held(install_wide_half, half)
    with ObservedOps(lambda _, ins, __: seen.extend(tensor.dtype for tensor in ins)):
        with native_products():
            torch.mm(ones, ones)
        natively = list(seen)
        torch.mm(ones, ones)
    handle.remove()
    assert set(natively) == {half}
    assert F32 in seen


@either_half
@pytest.mark.parametrize("lacks", [True, False])
def test_products_run_wide_where_torch_is_slow(
    half: torch.dtype, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float16 convolutions are slow on every CPU, other products without units for them."""
    monkeypatch.setattr("preamp.casting.functions.cpu_lacks_matmul", lambda _: lacks)
    seen: set[torch.dtype] = set()
    handle = held(install_wide_where_slow, half)
    try:
        with ObservedOps(lambda _, ins, __: seen.update(tensor.dtype for tensor in ins)):
            torch.mm(torch.ones(2, 2, dtype=half), torch.ones(2, 2, dtype=half))
            is_wide_product = F32 in seen
            seen.clear()
            F.conv1d(torch.ones(1, 1, 2, dtype=half), torch.ones(1, 1, 2, dtype=half))
    finally:
        handle.remove()
    assert is_wide_product is lacks
    assert (F32 in seen) is (lacks or half is F16)


@pytest.mark.filterwarnings("ignore")  # chain_matmul is deprecated
@pytest.mark.parametrize(("namespace", "name"), WIDE_FUNCTIONS)
@either_half
def test_dtypes_under_the_users_own_autocast_stay(
    namespace: str, name: str, half: torch.dtype
) -> None:
    """A program may use torch.autocast beside an engine; its results keep their dtypes."""
    row = OpRow(namespace=namespace, name=name, rule="half", reason="")  # pyright: ignore[reportArgumentType]

    def dtype() -> torch.dtype | None:
        with torch.autocast("cpu", half):
            try:
                return _first(getattr(namespace_owner(namespace), name)(*example(row))).dtype
            except RuntimeError:  # oneDNN has no half LSTM on some CPUs
                assert name == "lstm"
                return None

    before = dtype()
    handle = held(install_wide_half, half)
    beside = dtype()
    handle.remove()

    assert beside is before


@either_half
def test_where_onednn_cannot_be_asked_the_processor_tells(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cpu_lacks_matmul.__wrapped__
    oracle = {F16: [True, True, True, False], BF16: [True, True, False, False]}
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    for capability, lacks in zip(("DEFAULT", "AVX2", "AVX512", "NEON"), oracle[half], strict=True):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert asked(half) is lacks
