# SPDX-License-Identifier: BSD-3-Clause
"""What the operations on lists share: widening, masked stores, the flag."""

from __future__ import annotations

import math

import torch

from preamp.core.dtypes import math_dtype

Scalar = torch.Tensor | float
"""A number, or a float32 scalar on the device that is never read back."""


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that arithmetic on it is done in; itself if it has that dtype."""
    return tensor.to(math_dtype(tensor.dtype))


def store_(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None = None) -> None:
    """Round ``value`` into ``target``, or leave it as it is where the scalar ``skip`` is true."""
    target.copy_(value if skip is None else torch.where(skip, target, value))


def raise_flag_(flag: torch.Tensor, found: torch.Tensor) -> None:
    """Set the int32 scalar ``flag`` to 1 if the scalar ``found`` is true; never to 0."""
    flag.masked_fill_(found, 1)


def corrections(
    betas: tuple[float, float], step: Scalar, enabled: int | bool
) -> tuple[Scalar, Scalar]:
    """``1 - beta ** step`` for both moments, or ones if not ``enabled``."""
    if not enabled:
        return 1.0, 1.0
    return _correction(betas[0], step), _correction(betas[1], step)


def _correction(beta: float, step: Scalar) -> Scalar:
    if not isinstance(step, torch.Tensor):
        return 1.0 - beta**step
    # In float32 the difference itself would lose half the digits of 1 - 0.999.
    log = math.log(beta) if beta > 0 else -math.inf
    return -torch.expm1(step.to(torch.float32) * log)
