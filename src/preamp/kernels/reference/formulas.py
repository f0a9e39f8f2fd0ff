# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of the update rules, on one slot: a whole tensor, or a block of several.

A rule takes three steps. `measured` names the values whose norms it needs, of each tensor.
`number_of` makes of the norms the one number that it needs of each tensor. `apply` computes the
new values with it. Most rules need no norms, and have a case in `apply` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from preamp.kernels.formulas import FORMULAS, bind, terms
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
            return slot.p, direction_of(slot, rule, step)[0]
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


def _choose(condition: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition.to(a.device), a, b)
    return a if condition else b


_moments, _direction, _sgd, _lars, _adagrad, _novograd = (
    bind(
        formula,
        root=torch.sqrt,
        divide=torch.true_divide,
        corrected=torch.true_divide,
        choose=_choose,
    )
    for formula in FORMULAS
)


def apply(slot: Slot, rule: Rule, step: Step, number: Scalar) -> None:
    """Store the new parameter and state of ``slot``; ``number`` is that of its tensor."""
    numbers, options = terms(rule)
    given = (slot.p, slot.g, *slot.state)
    size: Any = slot.scalar(rule.lr)
    match rule:
        case AdamRule() | LambRule():
            u, m, v = direction_of(slot, rule, step)
            if isinstance(rule, LambRule):
                size = number
            elif rule.bias_correction is BiasCorrection.STEP_SIZE:
                c1, c2 = _corrections(slot, rule, step)
                size = size * c2**0.5 / c1
            slot.store(slot.p - size * u, m, v)
        case SgdRule():
            p, m = _sgd(*given, size, step == 1, **numbers, **options)
            slot.store(p, *([] if rule.leaves_state else [m]))
        case NovoGradRule():
            c1, c2 = _corrections(slot, rule, step) if rule.bias_correction else (1.0, 1.0)
            denominator = number / c2**0.5 + rule.eps
            slot.store(*_novograd(*given[:3], size, c1, denominator, **numbers, **options))
        case AdagradRule():
            slot.store(*_adagrad(*given, size, **numbers, **options))
        case LarsRule():
            slot.store(*_lars(*given, number, **numbers, **options))
        case _:
            left_out(rule)


def direction_of(
    slot: Slot, rule: AdamRule | LambRule, step: Step
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The direction of a step of a rule with two moments, and the new moments."""
    numbers, options = terms(rule)
    c1, c2 = _corrections(slot, rule, step) if options["CORRECTED"] else (1.0, 1.0)
    eps, decay, coupled = numbers.pop("eps"), numbers["decay"], options.pop("COUPLED")
    m, v = _moments(slot.p, slot.g, *slot.state, **numbers, COUPLED=coupled)
    return _direction(slot.p, m, v, c1, c2, eps, decay, **options), m, v


def _corrections(
    slot: Slot, rule: AdamRule | LambRule | NovoGradRule, step: Step
) -> tuple[Scalar, Scalar]:
    return slot.bias_correction(rule.beta1, step), slot.bias_correction(rule.beta2, step)
