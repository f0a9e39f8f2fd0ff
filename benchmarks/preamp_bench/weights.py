# SPDX-License-Identifier: BSD-3-Clause
"""Parameters without a model and gradients without a backward: all that an update needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

MAX_NORM = 1.0
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
"""AdamW's, for every variant; betas and eps are torch's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One size at which all variants are compared."""

    parameters: int  # elements of all tensors together
    tensors: int  # how many tensors
    half: torch.dtype  # ``torch.float16`` or ``torch.bfloat16``
    clip: bool  # whether every step clips the norm of the gradients
    device: torch.device  # where the tensors are

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor, as equal as they can be."""
        size, larger = divmod(self.parameters, self.tensors)
        return [size + (index < larger) for index in range(self.tensors)]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each tensor, as near to a square as its size allows."""
        return [_shape_of(size) for size in self.sizes]

    @property
    def scale(self) -> float:
        """The loss scale that is on half gradients: dynamic for float16, none for bfloat16."""
        return 2.0**16 if self.half is torch.float16 else 1.0

    @property
    def fp32_bytes(self) -> int:
        """What a step on float32 weights moves at least, in bytes per parameter.

        Gradients are read to be checked, then read with weights and both moments, which are
        written back.
        """
        return 4 + 4 + 3 * 8

    @property
    def half_bytes(self) -> int:
        """The same with half weights and masters; bfloat16 without clipping needs no check."""
        check = 2 if self.clip or self.scale != 1.0 else 0
        return check + 2 + 3 * 8 + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A variant, ready to run."""

    step: Callable[[], object]  # one step
    # What it updates for the model to use; all variants agree on it up to rounding.
    weights: Sequence[Tensor]


class Weights(nn.Module):
    """Parameters, and no forward."""

    def __init__(self, case: StepCase) -> None:
        """Draw one tensor and cut all others from it."""
        super().__init__()
        source = _normal(max(case.sizes), seed=0) * 0.02
        self.tensors = nn.ParameterList(
            _cut(source, shape).to(case.device, copy=True) for shape in case.shapes
        )


class Gradients:
    """Gradients that all variants of one dtype share, put back before every timed step."""

    def __init__(self, case: StepCase, dtype: torch.dtype, scale: float) -> None:
        """Draw small gradients and multiply them by the loss scale."""
        source = _normal(max(case.sizes), seed=1) * 1e-3 * scale
        self._fresh = [
            _cut(source, shape).to(case.device, dtype, copy=True) for shape in case.shapes
        ]
        self._buffers = [gradient.clone() for gradient in self._fresh]

    def refill(self) -> None:
        """Undo what a step did to them; not timed."""
        for buffer, gradient in zip(self._buffers, self._fresh, strict=True):
            buffer.copy_(gradient)

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stand for ``loss.backward()``: the gradients are there."""
        for parameter, buffer in zip(parameters, self._buffers, strict=True):
            parameter.grad = buffer


@lru_cache
def _shape_of(size: int) -> tuple[int, int]:
    rows = next(number for number in range(math.isqrt(size), 0, -1) if size % number == 0)
    return rows, size // rows


def _cut(source: Tensor, shape: tuple[int, int]) -> Tensor:
    return source[: math.prod(shape)].view(shape)


def _normal(count: int, *, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
