# SPDX-License-Identifier: BSD-3-Clause
"""The update rules: one row per branch, and each rule in float64 as the op table states it."""

from dataclasses import dataclass
from typing import Any

import torch

from cases.exact import Exact, where
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    SgdRule,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

SIGNATURES = (
    (F32, F32, F32, None),
    (F32, F16, F32, F16),
    (F32, BF16, F32, BF16),
    (BF16, BF16, BF16, None),
    (BF16, F32, F32, None),
    (F16, F16, F32, BF16),
    (F64, F64, F64, F32),
    (F64, F16, F32, None),
)
"""dtypes of parameters, gradients, state and halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """An op with a rule; ``states`` counts its lists of state, norms included."""

    op: str
    rule: Any
    states: int = 1

    @property
    def name(self) -> str:
        """For the names of tests: the op and the options that are set."""
        fields = {name: getattr(self.rule, name) for name in self.rule.__slots__}
        chosen = [name for name, value in fields.items() if value is True]
        chosen += [v.value for v in fields.values() if isinstance(v, BiasCorrection)]
        return "-".join([self.op, *chosen])


MOMENTS, STEP_SIZE = BiasCorrection.MOMENTS, BiasCorrection.STEP_SIZE
_MOMENTS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1}
USUAL: dict[Any, tuple[int, dict[str, Any]]] = {
    AdamRule: (
        2,
        {**_MOMENTS, "decoupled": True, "bias_correction": MOMENTS, "eps_inside_sqrt": False},
    ),
    LambRule: (
        2,
        {**_MOMENTS, "decoupled": True, "bias_correction": True}
        | {"grad_averaging": True, "uses_trust_ratio": True},
    ),
    SgdRule: (
        1,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
        | {"nesterov": False, "decays_after_momentum": False},
    ),
    NovoGradRule: (
        2,
        {**_MOMENTS, "bias_correction": True, "grad_averaging": True}
        | {"decays_inside_moment": True, "uses_max_norm": False},
    ),
    AdagradRule: (1, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1, "decoupled": False}),
    LarsRule: (
        1,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
        | {"trust_coefficient": 0.1, "eps": 1e-8, "uses_trust_ratio": True},
    ),
}
"""How many lists of state a rule has, and its options unless a row says others."""


def row(kind: Any, **options: Any) -> RuleRow:
    states, usual = USUAL[kind]
    op = f"{kind.__name__.removesuffix('Rule').lower()}_"
    return RuleRow(op=op, rule=kind(**{**usual, **options}), states=states)


ROWS = (
    row(AdamRule, weight_decay=0.0, decoupled=False, bias_correction=BiasCorrection.NONE),
    row(AdamRule, decoupled=False, eps_inside_sqrt=True),
    row(AdamRule),
    row(AdamRule, decoupled=False, bias_correction=STEP_SIZE),
    row(AdamRule, eps_inside_sqrt=True, bias_correction=STEP_SIZE),
    row(LambRule, weight_decay=0.0, decoupled=False, bias_correction=False),
    row(LambRule, decoupled=False, grad_averaging=False),
    row(LambRule, uses_trust_ratio=False),
    row(LambRule),
    row(SgdRule, momentum=0.0),
    row(SgdRule, decays_after_momentum=True),
    row(SgdRule, nesterov=True),
    row(NovoGradRule, bias_correction=False, decays_inside_moment=False),
    row(NovoGradRule, grad_averaging=False, decays_inside_moment=False),
    row(NovoGradRule, grad_averaging=False, uses_max_norm=True),
    row(NovoGradRule),
    row(AdagradRule, weight_decay=0.0),
    row(AdagradRule),
    row(AdagradRule, decoupled=True),
    row(LarsRule, nesterov=False),
    row(LarsRule),
    row(LarsRule, uses_trust_ratio=False),
)

FUSED = (row(AdamRule), row(AdagradRule))
"""Rules that the cpu back end leaves to kernels of torch's, where others of the op take none."""

ONE_EACH = (*{row.op: row for row in ROWS}.values(), *FUSED)
"""One row per op, and where an op has two ways to go, one for each."""


Update = tuple[Exact, ...]
"""The new parameter, and the new state in the order of the op's arguments."""

ONE = Exact.of(torch.ones(()))


def adam_(rule: Any, step: int, p: Exact, g: Exact, m: Exact, v: Exact) -> Update:
    decay = rule.weight_decay * p
    if not rule.decoupled:
        g = g + decay
    m = rule.beta1 * m + (1 - rule.beta1) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    c1, c2 = 1 - rule.beta1**step, 1 - rule.beta2**step
    size, m_used, v_used = float(rule.lr), m, v
    if rule.bias_correction is BiasCorrection.MOMENTS:
        m_used, v_used = m / c1, v / c2
    elif rule.bias_correction is BiasCorrection.STEP_SIZE:
        size = size * c2**0.5 / c1
    eps = rule.eps
    u = m_used / ((v_used + eps).sqrt() if rule.eps_inside_sqrt else v_used.sqrt() + eps)
    if rule.decoupled:
        u = u + decay
    return p - size * u, m, v


def lamb_(rule: Any, step: int, p: Exact, g: Exact, m: Exact, v: Exact) -> Update:
    decay = rule.weight_decay * p
    if not rule.decoupled:
        g = g + decay
    m = rule.beta1 * m + (1 - rule.beta1 if rule.grad_averaging else 1.0) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    c1, c2 = 1 - rule.beta1**step, 1 - rule.beta2**step
    if not rule.bias_correction:
        c1 = c2 = 1.0
    u = m / c1 / ((v / c2).sqrt() + rule.eps)
    if rule.decoupled:
        u = u + decay
    lengths = p.norm(), u.norm()
    is_scaled = rule.uses_trust_ratio and all(length.value > 0 for length in lengths)
    ratio = lengths[0] / lengths[1] if is_scaled else ONE
    return p - float(rule.lr) * ratio * u, m, v


def sgd_(rule: Any, step: int, p: Exact, g: Exact, m: Exact) -> Update:
    decay = rule.weight_decay * p
    if not rule.decays_after_momentum:
        g = g + decay
    if rule.momentum != 0:
        m = g if step == 1 else rule.momentum * m + (1 - rule.dampening) * g
        g = g + rule.momentum * m if rule.nesterov else m
    if rule.decays_after_momentum:
        g = g + decay
    return p - float(rule.lr) * g, m


def novograd_(rule: Any, step: int, p: Exact, g: Exact, m: Exact, v: Exact) -> Update:
    n = g.largest() if rule.uses_max_norm else g.norm()
    if rule.uses_max_norm:
        blend = rule.beta2 * v + (1 - rule.beta2) * n
    else:
        blend = (rule.beta2 * v * v + (1 - rule.beta2) * n * n).sqrt()
    v = where(v.value < 0, n, blend)
    c1, c2 = 1 - rule.beta1**step, 1 - rule.beta2**step
    if not rule.bias_correction:
        c1 = c2 = 1.0
    d = v / c2**0.5 + rule.eps
    beta3 = 1 - rule.beta1 if rule.grad_averaging else 1.0
    decay = rule.weight_decay * p
    if rule.decays_inside_moment:
        m = rule.beta1 * m + beta3 * (g / d + decay)
        return p - float(rule.lr) * m / c1, m, v
    m = rule.beta1 * m + beta3 * g
    return p - float(rule.lr) * (m / c1 / d + decay), m, v


def adagrad_(rule: Any, step: int, p: Exact, g: Exact, h: Exact) -> Update:
    del step
    decay = rule.weight_decay * p
    if not rule.decoupled:
        g = g + decay
    h = h + g * g
    u = g / (h.sqrt() + rule.eps)
    return p - float(rule.lr) * (u + decay if rule.decoupled else u), h


def lars_(rule: Any, step: int, p: Exact, g: Exact, m: Exact) -> Update:
    del step
    rate = Exact.of(torch.tensor(float(rule.lr), dtype=torch.float64))
    p_norm, g_norm = p.norm(), g.norm()
    if rule.uses_trust_ratio and p_norm.value > 0 and g_norm.value > 0:
        length = g_norm + rule.weight_decay * p_norm + rule.eps
        rate = rate * rule.trust_coefficient * p_norm / length
    change = rate * (g + rule.weight_decay * p)
    m = rule.momentum * m - change
    return p + (rule.momentum * m - change if rule.nesterov else m), m


ORACLES = {op.__name__: op for op in (adam_, lamb_, sgd_, novograd_, adagrad_, lars_)}
"""By op: functions of the rule, the step, and one parameter, gradient (unscaled) and its state."""
