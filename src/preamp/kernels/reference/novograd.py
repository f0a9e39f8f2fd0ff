# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import max_norm, norm, slots
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
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    for slot in slots(params, grads, exp_avgs, norms, update=update):
        p, g, (m, v), lr = slot.p, slot.g, slot.state, slot.scalar(rule.lr)
        v = _next_norm(rule, v, g)
        c1 = slot.bias_correction(rule.beta1, update.step) if rule.bias_correction else 1.0
        c2 = slot.bias_correction(rule.beta2, update.step) if rule.bias_correction else 1.0
        denominator = v / c2**0.5 + rule.eps
        if rule.decays_inside_moment:
            g = g / denominator + rule.weight_decay * p
            m = rule.beta1 * m + beta3 * g
            slot.store(p - lr * (m / c1), m, v)
        else:
            m = rule.beta1 * m + beta3 * g
            slot.store(p - lr * (m / c1 / denominator + rule.weight_decay * p), m, v)


def _next_norm(rule: NovoGradRule, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    if rule.uses_max_norm:
        n = max_norm(g)
        blend = rule.beta2 * v + (1 - rule.beta2) * n
    else:
        n = norm(g)
        blend = (rule.beta2 * v * v + (1 - rule.beta2) * n * n).sqrt()
    return torch.where(v < 0, n, blend)
