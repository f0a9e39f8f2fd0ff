# SPDX-License-Identifier: BSD-3-Clause
"""When steps that both FP16 optimizers skip are enough, and whose gradients overflow then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.core.errors import LossScaleError, worded
from preamp.policy import OPT_LEVELS

MAX_SKIPS = OPT_LEVELS["O2"].max_consecutive_skips or 50
"""Skipped steps in a row after which training cannot be going anywhere, as with amp."""


def dense_gradient(param: torch.Tensor) -> torch.Tensor:
    """The gradient of ``param``; zeros where it has none."""
    grad = param.grad
    if grad is None:
        return torch.zeros_like(param)
    return grad.to_dense() if grad.is_sparse else grad.detach()


def endless_overflow(
    skips: int, scale: float, groups: Sequence[Sequence[torch.Tensor]]
) -> LossScaleError:
    """Return the error for overflows that do not end. Synchronises."""
    where = [
        f"parameter {place} of group {index}, of shape {tuple(param.shape)}"
        for index, group in enumerate(groups)
        for place, param in enumerate(group)
        if not bool(torch.isfinite(dense_gradient(param)).all())
    ]
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return worded(
        LossScaleError,
        f"{skips} optimizer steps in a row skipped; gradients overflow in "
        f"{where[0] if where else 'their sum'}{more} at loss scale {scale}",
        "Training needs a step without overflow now and then",
        "Check that the loss is finite, call zero_grad() after each step, lower a static "
        "scale or the learning rate, or train in bfloat16",
    )
