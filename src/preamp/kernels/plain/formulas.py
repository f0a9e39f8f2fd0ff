# SPDX-License-Identifier: BSD-3-Clause
"""The formulas of the update rules, on a slot: some tensors, or pieces of large ones.

A rule takes three steps. `measured` names the values whose norms it needs, of each tensor.
`number_of` makes of the norms the one number that it needs of each tensor. `computed` returns the
new values with it. Most rules need no norms, and have a case in `computed` alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from preamp.kernels.plain.lists import Lists, choose
from preamp.kernels.plain.slots import Slot
from preamp.kernels.rules import (
    AdamRule,
    BiasCorrection,
    Formula,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    bound_formulas,
    check_known,
)
from preamp.kernels.update import Scalar

Step = int | torch.Tensor


def measured(slot: Slot, rule: Rule, step: Step) -> tuple[Lists, ...]:
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
            return lr * torch.where((p_norm > 0) & (u_norm > 0), ratio, torch.ones_like(ratio))
        case LarsRule(uses_trust_ratio=True):
            p_norm, g_norm = norms
            ratio = p_norm / (g_norm + rule.weight_decay * p_norm + rule.eps)
            ratio = rule.trust_coefficient * ratio
            return lr * torch.where((p_norm > 0) & (g_norm > 0), ratio, torch.ones_like(ratio))
        case NovoGradRule() if kept is not None:
            (n,), v = norms, kept
            if rule.uses_max_norm:
                blend = rule.beta2 * v + (1 - rule.beta2) * n
            else:
                blend = (rule.beta2 * v * v + (1 - rule.beta2) * n * n).sqrt()
            return torch.where(v < 0, n, blend)
        case _:
            return lr


def _divide(a: Any, b: Any) -> Any:
    return a / b


_FORMULAS = bound_formulas(
    lambda formula: formula, root=Lists.sqrt, divide=_divide, corrected=_divide, choose=choose
)


def computed(slot: Slot, rule: Rule, step: Step, number: Scalar) -> Sequence[Lists]:
    """The new parameters and state of ``slot``; ``number`` is that of each tensor, or of all."""
    check_known(rule)
    size: Any = slot.scalar(rule.lr)
    if isinstance(rule, (LambRule, LarsRule)):
        size = number
    elif isinstance(rule, AdamRule) and rule.bias_correction is BiasCorrection.STEP_SIZE:
        c1, c2 = _corrections(slot, rule, step)
        size = size * c2**0.5 / c1
    size = slot.of_each(size)
    formula, *others = rule.formulas
    if others:
        u, *state = direction_of(slot, rule, step)
        return slot.p - size * u, *state
    p, m = _call(formula, _told(slot, rule, step, number) | {"size": size})
    return p, m


def direction_of(slot: Slot, rule: Rule, step: Step) -> tuple[Lists, ...]:
    """The step of a rule with two moments before its size, and the new moments."""
    moments, direction = rule.formulas
    told = _told(slot, rule, step)
    m, v = _call(moments, told)
    return _call(direction, told | {"m": m, "v": v}), m, v


def _call(formula: Formula, told: Mapping[str, Any]) -> Any:
    return _FORMULAS[formula](*[told[name] for name in _names(formula)])


@functools.cache
def _names(formula: Formula) -> tuple[str, ...]:
    return tuple(inspect.signature(formula).parameters)


def _told(slot: Slot, rule: Rule, step: Step, number: Scalar = 0.0) -> dict[str, Any]:
    """What formulas ask for, but ``size``."""
    numbers, options = rule.terms
    told: dict[str, Any] = {"p": slot.p, "g": slot.g, **dict(zip("mv", slot.state, strict=False))}
    told.setdefault("m", None)  # which a rule that leaves its state does not ask for
    told |= {**numbers, **options, "is_first": slot.scalar(step) == 1}
    if isinstance(rule, (AdamRule, LambRule, NovoGradRule)):
        c1, c2 = _corrections(slot, rule, step) if rule.corrects else (1.0, 1.0)
        told |= {"c1": c1, "c2": c2}
        if isinstance(rule, NovoGradRule):
            told["denominator"] = slot.of_each(number / c2**0.5 + rule.eps)
    return told


def _corrections(
    slot: Slot, rule: AdamRule | LambRule | NovoGradRule, step: Step
) -> tuple[Scalar, ...]:
    """``1 - beta ** step`` of both.

    On the device as ``-expm1(step * log(beta))``: the plain form would lose half the digits
    of ``1 - 0.999`` in float32.
    """
    if not isinstance(step, torch.Tensor):
        return tuple(1.0 - beta**step for beta in (rule.beta1, rule.beta2))
    logs = (math.log(beta) if beta > 0 else -math.inf for beta in (rule.beta1, rule.beta2))
    return tuple(-torch.expm1(slot.scalar(step) * log) for log in logs)
