# SPDX-License-Identifier: BSD-3-Clause
"""LARS, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, both_nonzero, norm, slots
from preamp.kernels.rules import LarsRule, Scalar, Update


@torch.no_grad()
def lars_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: LarsRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lars_`."""
    for place, slot in enumerate(slots(params, grads, momentum_buffers, update=update)):
        rate = slot.scalar(rule.lr)
        if rule.uses_trust_ratio:
            p_norm, g_norm = (
                (norm(slot.p), norm(slot.g))
                if update.norms is None
                else slot.scalar(update.norms[:, place]).unbind()
            )
            rate = lars_rate(rate, p_norm, g_norm, rule)
        lars_slot(slot, rate, rule)


def lars_rate(
    lr: Scalar, p_norm: torch.Tensor, g_norm: torch.Tensor, rule: LarsRule
) -> torch.Tensor:
    """The learning rate times the trust ratio."""
    ratio = p_norm / (g_norm + rule.weight_decay * p_norm + rule.eps)
    ratio = rule.trust_coefficient * ratio
    return lr * torch.where(both_nonzero(p_norm, g_norm), ratio, torch.ones_like(ratio))


def lars_slot(slot: Slot, rate: Scalar, rule: LarsRule) -> None:
    """Update one slot by its own rate."""
    p, g, (m,) = slot.p, slot.g, slot.state
    step = rate * (g + rule.weight_decay * p)
    m = rule.momentum * m - step
    slot.store(p + (rule.momentum * m - step if rule.nesterov else m), m)
