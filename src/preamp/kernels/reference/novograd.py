# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, max_norm, norm, slots
from preamp.kernels.rules import NovoGradRule, Update


@torch.no_grad()
def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensors,
    *,
    rule: NovoGradRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.novograd_`."""
    measure = max_norm if rule.uses_max_norm else norm
    for place, slot in enumerate(slots(params, grads, exp_avgs, norms, update=update)):
        given = update.norms
        n = measure(slot.g) if given is None else slot.scalar(given[0, place])
        v = next_norm(rule, slot.state[1], n)
        slot.store(*novograd_values(slot, v, rule, update.step), v)


def novograd_values(
    slot: Slot, v: torch.Tensor, rule: NovoGradRule, step: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """New parameter and first moment of one slot, with ``v`` its new norm."""
    p, g, m, lr = slot.p, slot.g, slot.state[0], slot.scalar(rule.lr)
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    c1 = slot.bias_correction(rule.beta1, step) if rule.bias_correction else 1.0
    c2 = slot.bias_correction(rule.beta2, step) if rule.bias_correction else 1.0
    denominator = v / c2**0.5 + rule.eps
    if rule.decays_inside_moment:
        g = g / denominator + rule.weight_decay * p
        m = rule.beta1 * m + beta3 * g
        return p - lr * (m / c1), m
    m = rule.beta1 * m + beta3 * g
    return p - lr * (m / c1 / denominator + rule.weight_decay * p), m


def next_norm(rule: NovoGradRule, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Blend the norm ``n`` of a gradient into ``v``."""
    if rule.uses_max_norm:
        blend = rule.beta2 * v + (1 - rule.beta2) * n
    else:
        blend = (rule.beta2 * v * v + (1 - rule.beta2) * n * n).sqrt()
    return torch.where(v < 0, n, blend)
