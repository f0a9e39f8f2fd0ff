# SPDX-License-Identifier: BSD-3-Clause
"""LAMB, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, both_nonzero, norm, slots
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
    for place, slot in enumerate(slots(params, grads, exp_avgs, exp_avg_sqs, update=update)):
        u, m, v = lamb_direction(slot, rule, update.step)
        rate = slot.scalar(rule.lr)
        if rule.uses_trust_ratio:
            if update.norms is None:
                p_norm, u_norm = norm(slot.p), norm(u)
            else:
                p_norm, u_norm = slot.scalar(update.norms[:, place]).unbind()
            ratio = p_norm / u_norm
            rate = rate * torch.where(both_nonzero(p_norm, u_norm), ratio, torch.ones_like(ratio))
        slot.store(slot.p - rate * u, m, v)


@torch.no_grad()
def lamb_norms(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.lamb_norms`."""
    places = slots(params, grads, exp_avgs, exp_avg_sqs, update=update)
    found = [(norm(slot.p), norm(lamb_direction(slot, rule, update.step)[0])) for slot in places]
    return torch.stack([torch.stack(row) for row in zip(*found, strict=True)])


def lamb_direction(
    slot: Slot, rule: LambRule, step: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The direction of one slot's step, and its new moments."""
    p, g, (m, v) = slot.p, slot.g, slot.state
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    if rule.weight_decay != 0 and not rule.decoupled:
        g = g + rule.weight_decay * p
    m = rule.beta1 * m + beta3 * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    m_used, v_used = m, v
    if rule.bias_correction:
        m_used = m / slot.bias_correction(rule.beta1, step)
        v_used = v / slot.bias_correction(rule.beta2, step)
    u = m_used / (v_used.sqrt() + rule.eps)
    if rule.weight_decay != 0 and rule.decoupled:
        u = u + rule.weight_decay * p
    return u, m, v
