# SPDX-License-Identifier: BSD-3-Clause
"""Lists of tensors as the operations take them, and what they are compared with."""

from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}

SHAPES = ((), (0,), (1,), (7,), (2, 3), (3, 0, 2), (13,), (101,), (2, 3, 2, 2), (1, 2, 2, 2, 3))
shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)
layouts = st.sampled_from(["contiguous", "channels_last"])


def new_flag(value: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy whose memory is ordered by channels last, where there are channels."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if layout == "contiguous" or tensor.dim() not in formats:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.clone(memory_format=formats[tensor.dim()])


def random_list(
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
    seed: int = 0,
    *,
    layout: str = "contiguous",
    positive: bool = False,
) -> list[torch.Tensor]:
    """Normal values rounded to ``dtype``, or their magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(tuple(s), generator=generator, dtype=torch.float64) for s in shapes]
    return [in_layout((v.abs() if positive else v).to(dtype), layout) for v in values]


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def in_float64(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to(torch.float64, copy=True) for tensor in tensors]


def math_of(*dtypes: torch.dtype) -> torch.dtype:
    """The coarsest dtype that arithmetic on tensors of these dtypes passes through."""
    return torch.float64 if set(dtypes) == {torch.float64} else torch.float32


def assert_rounded(
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    sizes: Sequence[torch.Tensor] | None = None,
    *,
    math: torch.dtype = torch.float32,
    ulps: float = 8.0,
) -> None:
    """Each result is ``exact`` rounded once, after a few roundings of the arithmetic.

    Results too large for their dtype are left out.

    Args:
        ours: Results in their own dtype.
        exact: The same in float64.
        sizes: Magnitudes of the terms that were added up; those of ``exact`` if nothing cancels.
        math: What the arithmetic was done in.
        ulps: How many roundings of it may add up.
    """
    for got, wanted, size in zip(ours, exact, sizes or exact, strict=True):
        info = torch.finfo(got.dtype)
        tiny = info.smallest_normal * info.eps
        budget = info.eps / 2 * wanted.abs() + ulps * EPS[math] * size.abs() + tiny
        error = (got.double() - wanted).abs()
        fits = wanted.abs() < info.max * 0.99
        assert (error <= budget)[fits].all(), f"{got.dtype}: {(error / budget).max()} budgets"


def assert_near(
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    *,
    math: torch.dtype = torch.float32,
    ulps: float = 64.0,
) -> None:
    """As `assert_rounded` for a step on values around one, whose terms may cancel."""
    assert_rounded(ours, exact, [1 + tensor.abs() for tensor in exact], math=math, ulps=ulps)
