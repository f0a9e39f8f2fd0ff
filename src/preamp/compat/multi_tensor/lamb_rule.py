# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of LAMB in its two halves, which the operations put together in three ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.arithmetic import Scalar, store_, wide
from preamp.kernels import backend

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LambRule:
    """How LAMB turns gradients into updates, apart from the tensors.

    Attributes:
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        grad_weight: What a gradient counts for in the first moment.
        decoupled: Whether the decay is added to the update, or else to the gradient.
        corrections: ``1 - beta ** step`` for both moments, or ones.
        grad_factor: Removes the loss scale.
        clip_divisor: What gradients are divided by.
        skip: Scalar; nothing changes where it is true.
    """

    betas: tuple[float, float]
    eps: float
    grad_weight: float
    decoupled: bool
    corrections: tuple[Scalar, Scalar]
    clip_divisor: Scalar
    grad_factor: Scalar = 1.0
    skip: torch.Tensor | None = None


def clip_divisor(norm: torch.Tensor, largest: Scalar) -> torch.Tensor:
    """``norm / largest`` where the norm is larger, else 1; a ``largest`` of 0 clips nothing."""
    is_larger = (norm > largest) & (largest > 0)
    return torch.where(is_larger, norm / largest, 1.0)


def lamb_updates(
    lists: Sequence[Tensors], rule: LambRule, decays: Sequence[Scalar]
) -> list[torch.Tensor]:
    """Advance the moments of ``(grads, params, exp_avgs, exp_avg_sqs)``; return the updates.

    Args:
        lists: Gradients and parameters are not mutated.
        rule: What to do.
        decays: Weight decay of each tensor.

    Returns:
        Updates in the dtype of the arithmetic.
    """
    updates: list[torch.Tensor] = []
    (beta1, beta2), (c1, c2) = rule.betas, rule.corrections
    for grad, param, exp_avg, exp_avg_sq, decay in zip(*lists, decays, strict=True):
        p = wide(param)
        g = wide(grad) * rule.grad_factor / rule.clip_divisor
        if not rule.decoupled:
            g = g + decay * p
        m = beta1 * wide(exp_avg) + rule.grad_weight * g
        v = beta2 * wide(exp_avg_sq) + (1 - beta2) * g * g
        update = (m / c1) / ((v / c2).sqrt() + rule.eps)
        updates.append(update + decay * p if rule.decoupled else update)
        store_(exp_avg, m, rule.skip)
        store_(exp_avg_sq, v, rule.skip)
    return updates


def trust_rates(
    param_norms: torch.Tensor, update_norms: torch.Tensor, lr: Scalar
) -> Sequence[Scalar]:
    """The step size of each tensor: ``lr * |p| / |u|`` where both norms are positive, else lr."""
    usable = (param_norms > 0) & (update_norms > 0)
    return (lr * torch.where(usable, param_norms / update_norms, 1.0)).unbind()


def apply_updates_(
    params: Tensors,
    updates: Tensors,
    rates: Sequence[Scalar],
    copies: Sequence[torch.Tensor | None] | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """``p = p - rate * update``; copies receive the rounded parameters."""
    copies = copies or [None] * len(params)
    for param, update, rate, copy in zip(params, updates, rates, copies, strict=True):
        p = wide(param) - rate * wide(update)
        store_(param, p, skip)
        if copy is not None:
            store_(copy, param, skip)


def norms_of(tensors: Tensors) -> torch.Tensor:
    """The norm of each tensor."""
    return backend().l2norms(tensors, None, tensors[0].device)
