# SPDX-License-Identifier: BSD-3-Clause
"""LARS, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import both_nonzero, norm, slots
from preamp.kernels.rules import LarsRule, Update


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
    for slot in slots(params, grads, momentum_buffers, update=update):
        p, g, (m,), rate = slot.p, slot.g, slot.state, slot.scalar(rule.lr)
        if rule.uses_trust_ratio:
            p_norm, g_norm = norm(p), norm(g)
            ratio = p_norm / (g_norm + rule.weight_decay * p_norm + rule.eps)
            ratio = rule.trust_coefficient * ratio
            rate = rate * torch.where(both_nonzero(p_norm, g_norm), ratio, torch.ones_like(ratio))
        step = rate * (g + rule.weight_decay * p)
        m = rule.momentum * m - step
        slot.store(p + (rule.momentum * m - step if rule.nesterov else m), m)
