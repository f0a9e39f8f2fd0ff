# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, slots
from preamp.kernels.rules import AdamRule, BiasCorrection, Update


@torch.no_grad()
def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: AdamRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.adam_`."""
    for slot in slots(params, grads, exp_avgs, exp_avg_sqs, update=update):
        adam_slot(slot, rule, update.step)


def adam_slot(slot: Slot, rule: AdamRule, step: int | torch.Tensor) -> None:
    """Update one slot."""
    p, g, (m, v), size = slot.p, slot.g, slot.state, slot.scalar(rule.lr)
    if rule.weight_decay != 0 and not rule.decoupled:
        g = g + rule.weight_decay * p
    m = rule.beta1 * m + (1 - rule.beta1) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    m_used, v_used = m, v
    if rule.bias_correction is not BiasCorrection.NONE:
        c1 = slot.bias_correction(rule.beta1, step)
        c2 = slot.bias_correction(rule.beta2, step)
        if rule.bias_correction is BiasCorrection.MOMENTS:
            m_used, v_used = m / c1, v / c2
        else:
            size = size * c2**0.5 / c1
    if rule.eps_inside_sqrt:
        direction = m_used / (v_used + rule.eps).sqrt()
    else:
        direction = m_used / (v_used.sqrt() + rule.eps)
    if rule.weight_decay != 0 and rule.decoupled:
        direction = direction + rule.weight_decay * p
    slot.store(p - size * direction, m, v)
