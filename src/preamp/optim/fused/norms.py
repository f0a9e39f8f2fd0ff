# SPDX-License-Identifier: BSD-3-Clause
"""The global norm of gradients, and the factor that clips them to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from preamp.kernels import backend
from preamp.optim.fused.base import Entry

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def global_norm(entries: Sequence[Entry]) -> torch.Tensor:
    """L2 norm over all gradients, a scalar on the device of the first parameter.

    float32, or float64 if one of the gradients is.
    """
    device = entries[0][0].device
    grads = [grad for _, grad, _ in entries]
    if all(grad.dtype is not torch.float64 for grad in grads):
        return backend().l2norm(grads, [None] * len(grads), device)
    norms = [_vector_norm(grad, dtype=torch.float64).to(device) for grad in grads]
    return _vector_norm(torch.stack(norms))


def clip_factor(
    entries: Sequence[Entry], max_norm: float, inv_scale: torch.Tensor | None
) -> torch.Tensor | None:
    """What unscales gradients and clips them to a global norm, in one factor.

    Args:
        entries: Gradients of all groups.
        max_norm: Largest norm of the unscaled gradients; 0 for no clipping.
        inv_scale: What unscales them, or ``None``.

    Returns:
        A scalar on the device of the first parameter, or ``None`` where there is nothing to do.
    """
    if max_norm == 0 or not entries:
        return inv_scale
    norm = global_norm(entries)
    one = torch.ones_like(norm)
    scale = one if inv_scale is None else inv_scale.to(norm.device)
    norm = norm * scale
    return torch.where(norm > max_norm, max_norm / norm, one) * scale
