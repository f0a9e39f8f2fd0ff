# SPDX-License-Identifier: BSD-3-Clause
"""LAMB, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import both_nonzero, norm, slots
from preamp.kernels.rules import LambRule, Update


@torch.no_grad()
def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lamb_`."""
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    for slot in slots(params, grads, exp_avgs, exp_avg_sqs, update=update):
        p, g, (m, v), rate = slot.p, slot.g, slot.state, slot.scalar(rule.lr)
        if rule.weight_decay != 0 and not rule.decoupled:
            g = g + rule.weight_decay * p
        m = rule.beta1 * m + beta3 * g
        v = rule.beta2 * v + (1 - rule.beta2) * g * g
        m_used, v_used = m, v
        if rule.bias_correction:
            m_used = m / slot.bias_correction(rule.beta1, update.step)
            v_used = v / slot.bias_correction(rule.beta2, update.step)
        u = m_used / (v_used.sqrt() + rule.eps)
        if rule.weight_decay != 0 and rule.decoupled:
            u = u + rule.weight_decay * p
        if rule.uses_trust_ratio:
            p_norm, u_norm = norm(p), norm(u)
            ratio = p_norm / u_norm
            rate = rate * torch.where(both_nonzero(p_norm, u_norm), ratio, torch.ones_like(ratio))
        slot.store(p - rate * u, m, v)
