# SPDX-License-Identifier: BSD-3-Clause
"""One row per branch of the update rules, for back ends to be compared over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from preamp.kernels import (
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


_MOMENTS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}


def _adam(correction: BiasCorrection, decay: float, decoupled: bool, inside: bool) -> RuleRow:
    rule = AdamRule(
        **_MOMENTS,
        weight_decay=decay,
        decoupled=decoupled,
        bias_correction=correction,
        eps_inside_sqrt=inside,
    )
    return RuleRow(op="adam_", rule=rule, states=2)


def _lamb(decay: float, decoupled: bool, corrects: bool, averages: bool, trusts: bool) -> RuleRow:
    rule = LambRule(
        **_MOMENTS,
        weight_decay=decay,
        decoupled=decoupled,
        bias_correction=corrects,
        grad_averaging=averages,
        uses_trust_ratio=trusts,
    )
    return RuleRow(op="lamb_", rule=rule, states=2)


def _sgd(momentum: float, decay: float, nesterov: bool, after: bool) -> RuleRow:
    rule = SgdRule(
        lr=0.1,
        momentum=momentum,
        dampening=0.25,
        weight_decay=decay,
        nesterov=nesterov,
        decays_after_momentum=after,
    )
    return RuleRow(op="sgd_", rule=rule)


def _novograd(corrects: bool, averages: bool, inside: bool, largest: bool) -> RuleRow:
    rule = NovoGradRule(
        **_MOMENTS,
        weight_decay=0.1,
        bias_correction=corrects,
        grad_averaging=averages,
        decays_inside_moment=inside,
        uses_max_norm=largest,
    )
    return RuleRow(op="novograd_", rule=rule, states=2)


def _adagrad(decay: float, decoupled: bool) -> RuleRow:
    rule = AdagradRule(lr=0.1, eps=1e-3, weight_decay=decay, decoupled=decoupled)
    return RuleRow(op="adagrad_", rule=rule)


def _lars(nesterov: bool, trusts: bool) -> RuleRow:
    rule = LarsRule(
        lr=0.1,
        momentum=0.9,
        weight_decay=0.1,
        nesterov=nesterov,
        trust_coefficient=0.1,
        eps=1e-8,
        uses_trust_ratio=trusts,
    )
    return RuleRow(op="lars_", rule=rule)


ROWS = (
    _adam(BiasCorrection.NONE, 0.0, decoupled=False, inside=False),
    _adam(BiasCorrection.MOMENTS, 0.1, decoupled=False, inside=True),
    _adam(BiasCorrection.MOMENTS, 0.1, decoupled=True, inside=False),
    _adam(BiasCorrection.STEP_SIZE, 0.1, decoupled=False, inside=False),
    _adam(BiasCorrection.STEP_SIZE, 0.1, decoupled=True, inside=True),
    _lamb(0.0, decoupled=False, corrects=False, averages=True, trusts=True),
    _lamb(0.1, decoupled=False, corrects=True, averages=False, trusts=True),
    _lamb(0.1, decoupled=True, corrects=True, averages=True, trusts=False),
    _lamb(0.1, decoupled=True, corrects=True, averages=True, trusts=True),
    _sgd(0.0, 0.1, nesterov=False, after=False),
    _sgd(0.9, 0.1, nesterov=False, after=True),
    _sgd(0.9, 0.1, nesterov=True, after=False),
    _novograd(corrects=False, averages=True, inside=False, largest=False),
    _novograd(corrects=True, averages=False, inside=False, largest=False),
    _novograd(corrects=True, averages=False, inside=True, largest=True),
    _novograd(corrects=True, averages=True, inside=True, largest=False),
    _adagrad(0.0, decoupled=False),
    _adagrad(0.1, decoupled=False),
    _adagrad(0.1, decoupled=True),
    _lars(nesterov=False, trusts=True),
    _lars(nesterov=True, trusts=True),
    _lars(nesterov=True, trusts=False),
)

FUSED = (
    _adam(BiasCorrection.MOMENTS, 0.1, decoupled=True, inside=False),
    _adagrad(0.1, decoupled=False),
)
"""Rules that the cpu back end leaves to kernels of torch's, where others of the op take none."""

ONE_EACH = (*{row.op: row for row in ROWS}.values(), *FUSED)
"""One row per op, and where an op has two ways to go, one for each."""
