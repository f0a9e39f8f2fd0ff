# SPDX-License-Identifier: BSD-3-Clause
"""Triton's census at the edges of its chunks, and rounding of every half value."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cases.rules import BF16, F16, F32, F64
from cases.selection import examples
from cases.tolerances import assert_same
from preamp.kernels import backend

REFERENCE = backend("reference")
CPU = torch.device("cpu")
DTYPES = (F16, BF16, F32, F64)
SIZES = (0, 1, 7, 1024, 1031, 8193)

# The fixture that is made once per test holds a back end, which has no state.
few = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
bad_values = st.sampled_from([math.inf, -math.inf, math.nan])
dtypes = st.sampled_from(DTYPES)


@st.composite
def tensors(draw: Any, dtype: Any = dtypes, size: Any = None) -> torch.Tensor:
    """Finite values of every magnitude, in any layout that is or is not dense."""
    kind = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    size = draw(st.sampled_from([0, 1, 5, 12, 1031])) if size is None else size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    numbers = torch.randn(size, generator=generator, dtype=F64)
    numbers *= 10.0 ** (torch.rand(size, generator=generator, dtype=F64) * 40 - 30)
    largest = torch.finfo(kind).max
    data = numbers.clamp(-largest, largest).to(kind)
    layout = draw(st.sampled_from(["flat", "strided", "unaligned", "matrix", "transposed"]))
    if layout == "strided":
        return torch.stack([data, torch.full_like(data, math.nan)], dim=1)[:, 0]
    if layout == "unaligned":
        return torch.cat([data[:1], data])[1:] if size else data
    if layout in ("matrix", "transposed") and size == 12:
        return data.reshape(3, 4) if layout == "matrix" else data.reshape(3, 4).t()
    return data


def on(device: torch.device, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on ``device``, in their layout; nan between strided ones stays nan."""
    if device.type == "cpu":
        return found
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
        for t in found
    ]


def sparse(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    rows = torch.tensor([[1, 1, 4][: len(values)]])
    data = torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(rows, data, (6,), check_invariants=True)


# -- census and norms ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_census_at_every_place_of_a_chunk(
    triton_ops: Any, device: torch.device, dtype: torch.dtype
) -> None:
    grads = [torch.ones(size, dtype=dtype, device=device) for size in SIZES]
    for value in (math.inf, math.nan):
        for which, place in ((1, 0), (4, 1030), (5, 0), (5, 1024), (5, 8191), (5, 8192)):
            grads[which][place] = value
            census = triton_ops.census(grads, device, with_norm=True)
            grads[which][place] = 1.0
            assert_same(census.found_inf, torch.ones((), device=device))
            wanted = [float(size > 0) for size in SIZES]
            wanted[which] = value
            assert census.max_abs.tolist() == pytest.approx(wanted, nan_ok=True)
            assert math.isfinite(census.norm) is False
    census = triton_ops.census(grads, device, with_norm=True)
    assert_same(census.found_inf, torch.zeros((), device=device))
    wanted = torch.tensor(sum(SIZES), dtype=F64).sqrt().to(device, F32)
    torch.testing.assert_close(census.norm, wanted, rtol=2.0**-22, atol=0.0)


def test_census_keeps_the_order_of_mixed_gradients(ops: Any) -> None:
    """Several launches, and tensors that no kernel takes, end up in one result."""
    grads = [
        torch.tensor([3.0], dtype=F16),
        torch.tensor([-4.0]),
        sparse([1.0, 5.0, -2.0], F32),
        torch.tensor([[7.0, math.nan]])[:, ::2],
        torch.tensor([8.0 - 6.0j]),
        torch.tensor([1e300], dtype=F64),
        torch.tensor([9.0], dtype=F16),
    ]
    census = ops.census(grads, CPU, with_norm=True)
    found = census.max_abs.tolist()
    assert found[:5] + found[6:] == [3.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    assert found[5] >= torch.finfo(F32).max
    assert census.found_inf.item() == 0.0  # 1e300 is finite, though not in float32
    wanted = [3.0, 4.0, math.hypot(6, 2), 7.0, 10.0, math.inf, 9.0]
    assert census.norm.item() == math.inf
    del grads[5], wanted[5]
    census = ops.census(grads, CPU, with_norm=True)
    assert census.norm.item() == pytest.approx(math.hypot(*wanted))
    assert ops.l2norms(grads, None, CPU).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_against_float64(ops: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    by = torch.tensor(2.0**-10)
    for factor in (None, by):
        exact = torch.stack([g.double().norm() * (1.0 if factor is None else by) for g in grads])
        norms = ops.l2norms(grads, factor, CPU)
        torch.testing.assert_close(norms.double(), exact, rtol=2.0**-20, atol=0.0)
        again = ops.l2norms([grad.clone() for grad in grads], factor, CPU)
        assert_same(again, norms)  # the order of the sums does not depend on the run
    mixed = [None, by, None, by, None, by]
    scaled = [1.0 if f is None else float(f) for f in mixed]
    total = math.hypot(*[float(g.double().norm()) * f for g, f in zip(grads, scaled, strict=True)])
    assert ops.l2norm(grads, mixed, CPU).item() == pytest.approx(total, rel=2.0**-20)
    assert ops.l2norm(grads, [None] * 6, CPU).dtype is F32


EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int16)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_rounding_is_torchs(ops: Any, half: torch.dtype) -> None:
    """All half values, the midpoints above them, and their neighbours in float32."""
    every = EVERY_HALF.view(half).float()
    step = 2**12 if half is F16 else 2**15
    bits = every.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, step - 1, step, step + 1])
    source = bits.reshape(-1).view(F32)
    target = torch.empty_like(source, dtype=half)
    ops.cast_copy_([source], [target])
    wanted = source.to(half)
    assert torch.equal(target.isnan(), wanted.isnan())
    assert torch.equal(target.nan_to_num(), wanted.nan_to_num())
    zeros = wanted == 0
    assert torch.equal(torch.signbit(target[zeros]), torch.signbit(wanted[zeros]))
    back = torch.empty_like(source)
    ops.cast_copy_([wanted], [back])
    assert torch.equal(back.nan_to_num(), wanted.float().nan_to_num())
