# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of the update rules, on one slot: a whole tensor, or a block of several.

A rule takes three steps. `measured` names the values whose norms it needs, of each tensor.
`number_of` makes of the norms the one number that it needs of each tensor. `apply` computes the
new values with it. Most rules need no norms, and have a case in `apply` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from preamp.kernels.reference.update import Slot, both_nonzero
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    Scalar,
    SgdRule,
    left_out,
)

Step = int | torch.Tensor


def takes_norms(rule: Rule) -> bool:
    """Whether ``rule`` needs norms, `measured` or given in ``Update.norms``."""
    return isinstance(rule, NovoGradRule) or (
        isinstance(rule, (LambRule, LarsRule)) and rule.uses_trust_ratio
    )


def measured(slot: Slot, rule: Rule, step: Step) -> tuple[torch.Tensor, ...]:
    """The values whose norms ``rule`` needs."""
    match rule:
        case LambRule(uses_trust_ratio=True):
            return slot.p, lamb_direction(slot, rule, step)[0]
        case LarsRule(uses_trust_ratio=True):
            return slot.p, slot.g
        case NovoGradRule():
            return (slot.g,)
        case _:
            return ()


def order_of(rule: Rule) -> float:
    """Of which order these norms are."""
    return math.inf if isinstance(rule, NovoGradRule) and rule.uses_max_norm else 2.0


def number_of(
    rule: Rule, lr: Scalar, norms: Sequence[torch.Tensor], kept: torch.Tensor | None
) -> Scalar:
    """The number that ``rule`` needs of each tensor: of NovoGrad its norm, else its learning rate.

    ``norms`` are those of what is `measured`, scalars, or vectors for several tensors; ``kept``
    is what the rule keeps as the last list of its state, in the same form.
    """
    match rule:
        case LambRule(uses_trust_ratio=True):
            p_norm, u_norm = norms
            ratio = p_norm / u_norm
            return lr * torch.where(both_nonzero(p_norm, u_norm), ratio, torch.ones_like(ratio))
        case LarsRule(uses_trust_ratio=True):
            p_norm, g_norm = norms
            ratio = p_norm / (g_norm + rule.weight_decay * p_norm + rule.eps)
            ratio = rule.trust_coefficient * ratio
            return lr * torch.where(both_nonzero(p_norm, g_norm), ratio, torch.ones_like(ratio))
        case NovoGradRule() if kept is not None:
            (n,), v = norms, kept
            if rule.uses_max_norm:
                blend = rule.beta2 * v + (1 - rule.beta2) * n
            else:
                blend = (rule.beta2 * v * v + (1 - rule.beta2) * n * n).sqrt()
            return torch.where(v < 0, n, blend)
        case _:
            return lr


def apply(slot: Slot, rule: Rule, step: Step, number: Scalar) -> None:
    """Store the new parameter and state of ``slot``; ``number`` is that of its tensor."""
    match rule:
        case AdamRule():
            adam(slot, rule, step)
        case LambRule():
            u, m, v = lamb_direction(slot, rule, step)
            slot.store(slot.p - number * u, m, v)
        case SgdRule():
            sgd(slot, rule, step)
        case NovoGradRule():
            novograd(slot, rule, step, number)
        case AdagradRule():
            adagrad(slot, rule)
        case LarsRule():
            lars(slot, rule, number)
        case _:
            left_out(rule)


def decayed(slot: Slot, rule: AdamRule | LambRule | AdagradRule) -> torch.Tensor:
    """The gradient, with the weight decay added to it unless that is decoupled."""
    if rule.weight_decay != 0 and not rule.decoupled:
        return slot.g + rule.weight_decay * slot.p
    return slot.g


def with_decay(
    direction: torch.Tensor, slot: Slot, rule: AdamRule | LambRule | AdagradRule
) -> torch.Tensor:
    """``direction``, with the weight decay added to it if that is decoupled."""
    if rule.weight_decay != 0 and rule.decoupled:
        return direction + rule.weight_decay * slot.p
    return direction


def adam(slot: Slot, rule: AdamRule, step: Step) -> None:
    """See `AdamRule`."""
    g, (m, v), size = decayed(slot, rule), slot.state, slot.scalar(rule.lr)
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
    slot.store(slot.p - size * with_decay(direction, slot, rule), m, v)


def lamb_direction(
    slot: Slot, rule: LambRule, step: Step
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The direction of a step of `LambRule`, and the new moments."""
    g, (m, v) = decayed(slot, rule), slot.state
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    m = rule.beta1 * m + beta3 * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    m_used, v_used = m, v
    if rule.bias_correction:
        m_used = m / slot.bias_correction(rule.beta1, step)
        v_used = v / slot.bias_correction(rule.beta2, step)
    return with_decay(m_used / (v_used.sqrt() + rule.eps), slot, rule), m, v


def sgd(slot: Slot, rule: SgdRule, step: Step) -> None:
    """See `SgdRule`."""
    decays = rule.weight_decay != 0
    p, g, (m,) = slot.p, slot.g, slot.state
    if decays and not rule.decays_after_momentum:
        g = g + rule.weight_decay * p
    if rule.momentum != 0:
        later = rule.momentum * m + (1 - rule.dampening) * g
        if isinstance(step, torch.Tensor):
            m = torch.where(step.to(g.device) == 1, g, later)
        else:
            m = g if step == 1 else later
        g = g + rule.momentum * m if rule.nesterov else m
    if decays and rule.decays_after_momentum:
        g = g + rule.weight_decay * p
    slot.store(p - slot.scalar(rule.lr) * g, *([m] if rule.momentum != 0 else []))


def novograd(slot: Slot, rule: NovoGradRule, step: Step, v: Scalar) -> None:
    """See `NovoGradRule`; ``v`` is the new norm."""
    p, g, m, lr = slot.p, slot.g, slot.state[0], slot.scalar(rule.lr)
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    c1 = slot.bias_correction(rule.beta1, step) if rule.bias_correction else 1.0
    c2 = slot.bias_correction(rule.beta2, step) if rule.bias_correction else 1.0
    denominator = v / c2**0.5 + rule.eps
    if rule.decays_inside_moment:
        g = g / denominator + rule.weight_decay * p
        m = rule.beta1 * m + beta3 * g
        slot.store(p - lr * (m / c1), m)
    else:
        m = rule.beta1 * m + beta3 * g
        slot.store(p - lr * (m / c1 / denominator + rule.weight_decay * p), m)


def adagrad(slot: Slot, rule: AdagradRule) -> None:
    """See `AdagradRule`."""
    g, (h,) = decayed(slot, rule), slot.state
    h = h + g * g
    direction = with_decay(g / (h.sqrt() + rule.eps), slot, rule)
    slot.store(slot.p - slot.scalar(rule.lr) * direction, h)


def lars(slot: Slot, rule: LarsRule, rate: Scalar) -> None:
    """See `LarsRule`; ``rate`` is the tensor's own."""
    p, g, (m,) = slot.p, slot.g, slot.state
    step = rate * (g + rule.weight_decay * p)
    m = rule.momentum * m - step
    slot.store(p + (rule.momentum * m - step if rule.nesterov else m), m)
