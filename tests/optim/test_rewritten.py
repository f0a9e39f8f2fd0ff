# SPDX-License-Identifier: BSD-3-Clause
"""Telling from values by which factor a script has multiplied half gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from preamp.core.splits import Splits
from preamp.optim.rewritten import factors_of

HALVES = (torch.float16, torch.bfloat16)


def _gradients(seed: int, dtype: torch.dtype, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _found(before: Any, after: Any, splits: Splits | None = None) -> list[float | None]:
    tables = (dict(enumerate(grads)) for grads in (before, after, before))
    return list(factors_of(*tables, splits)[0].values())


@pytest.mark.parametrize("dtype", HALVES)
@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 99),
    factor=st.floats(2.0**-6, 64.0) | st.sampled_from([1.0, 0.5, 2.0**-7]),
    sign=st.sampled_from([1.0, -1.0]),
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    times=st.integers(1, 2),
)
def test_a_factor_is_found(
    dtype: torch.dtype, seed: int, factor: float, sign: float, sizes: list[int], times: int
) -> None:
    """It explains what is there: to a rounding, and better the more values there are."""
    before = _gradients(seed, dtype, sizes)
    after = [grad.clone() for grad in before]
    for _ in range(times):
        for grad in after:
            grad.mul_(sign * factor)
    found = _found(before, after)
    wanted = (sign * factor) ** times
    for one, grad in zip(found, before, strict=True):
        if grad.numel():
            assert one is not None
            assert abs(one / wanted - 1) <= 2.0 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.clamp(-0.5, 0.5),
        lambda grad: grad + 0.125,
        lambda grad: grad.sign(),
        lambda grad: grad.abs(),
        lambda grad: torch.where(grad.abs() < 0.1, 0, grad),
        lambda grad: grad * torch.linspace(0.9, 1.1, grad.numel()).to(grad),
        lambda grad: grad.flip(0),
    ],
)
def test_anything_else_is_no_factor(dtype: torch.dtype, change: Any) -> None:
    before = _gradients(0, dtype, [100, 80])
    assert _found(before, [change(before[0]), before[1]]) == [None, 1.0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("last", [False, True])
def test_infinities_made_finite_are_no_product(dtype: torch.dtype, last: bool) -> None:
    """Nor the other way round: with a factor, what the script has put there would be lost."""
    for value in (torch.inf, -torch.inf, torch.nan):
        finite, infinite = _gradients(0, dtype, [100_000]) * 2
        infinite = infinite.clone()
        infinite[-1 if last else 0] = value
        assert _found([infinite], [finite]) == [None]
        assert _found([finite], [infinite]) == [None]


def test_large_gradients_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preamp.optim.rewritten._BLOCK", 64)
    (before,) = _gradients(0, torch.float16, [1000])
    after = before * 0.5
    assert _found([before], [after]) == [0.5]
    after[900] *= 2
    assert _found([before], [after]) == [None]


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank has found in its part decides here as well."""
    (before,) = _gradients(0, torch.float16, [100])
    (theirs,) = _gradients(1, torch.float16, [50])
    said: list[list[torch.Tensor]] = []

    def keep(vectors: Any, over: Any) -> None:
        said.append([vector.clone() for vector in vectors])

    def found(their_after: torch.Tensor) -> list[float | None]:
        said.clear()
        other, splits = Splits(), Splits()
        for name in ("sum_", "max_"):
            monkeypatch.setattr(other, name, keep)
        _found([theirs], [their_after], other)
        sums, misfits = said

        def join(how: Any, more: list[torch.Tensor], vectors: Any, over: Any) -> None:
            for vector, other in zip(vectors, more, strict=True):
                vector.copy_(how(vector, other))

        monkeypatch.setattr(splits, "sum_", partial(join, torch.add, sums))
        monkeypatch.setattr(splits, "max_", partial(join, torch.maximum, misfits))
        return _found([before], [before * 0.5], splits)

    assert found(theirs * 0.5) == [0.5]
    assert found(theirs.clamp(-0.5, 0.5)) == [None]
