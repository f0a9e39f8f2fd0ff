# SPDX-License-Identifier: BSD-3-Clause
"""The global norm of gradients, and the factor that clips them to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from preamp.kernels import Ops
from preamp.optim.fused.entries import Entry

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def global_norm(entries: Sequence[Entry], ops: Ops) -> torch.Tensor:
    """L2 norm over all unscaled gradients, a scalar on the device of the first parameter.

    float32, or float64 if one of the gradients is.
    """
    device = entries[0].param.device
    if all(entry.grad.dtype is not torch.float64 for entry in entries):
        grads = [entry.grad for entry in entries]
        return ops.l2norm(grads, [entry.factor for entry in entries], device)
    return _vector_norm(torch.stack([_wide_norm(entry).to(device) for entry in entries]))


def _wide_norm(entry: Entry) -> torch.Tensor:
    norm = _vector_norm(entry.grad, dtype=torch.float64)
    return norm if entry.factor is None else norm * entry.factor


def clip_factor(
    entries: Sequence[Entry], max_norm: float, inv_scale: torch.Tensor | None, ops: Ops
) -> torch.Tensor | None:
    """What unscales gradients and clips them to a global norm, in one factor.

    Args:
        entries: Gradients of all groups.
        max_norm: Largest norm of the unscaled gradients; 0 for no clipping.
        inv_scale: What unscales them, or ``None``.
        ops: The back end.

    Returns:
        A scalar on the device of the first parameter, or ``None`` where there is nothing to do.
    """
    if max_norm == 0 or not entries:
        return inv_scale
    norm = global_norm(entries, ops)
    one = torch.ones_like(norm)
    scale = one if inv_scale is None else inv_scale.to(norm.device)
    norm = norm * scale
    return torch.where(norm > max_norm, max_norm / norm, one) * scale
