# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportMissingTypeStubs=false
"""The update rules for one element: `preamp.kernels.rules`, each operation rounded on its own.

A rule comes as a record of numbers in the dtype of the computation, and of options, which become a
choice between two results in each lane. Operations come in the order of
`preamp.kernels.reference.formulas`, except that moments are multiplied by inverse bias corrections:
each division takes a processor as long as a dozen products. `told` makes the record of a rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numba.extending import overload

from preamp.kernels.jit.compiler import ALWAYS_INLINE, part
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


class Work(Protocol):
    """The tensors of one launch, as far as a rule asks for them."""

    @property
    def step(self) -> int:
        """The number of the update."""
        ...

    def numbers_as(self, **values: Scalar) -> dict[str, Any]:
        """Numbers in the dtype of the computation, by name."""
        ...

    def correction(self, beta: float, *, wanted: bool) -> float:
        """``1 / (1 - beta ** step)``, or 1 for none."""
        ...

    def numbers_of(self, rule: Rule) -> Scalar:
        """Of each tensor the number that the rule needs; that of NovoGrad is kept."""
        ...


class Moments(NamedTuple):
    """See `AdamRule` and `LambRule`."""

    beta1: Any
    share: Any  # of a new gradient in the first moment
    beta2: Any
    beta2_left: Any  # ``1 - beta2``
    eps: Any  # added to the root of the second moment
    eps_inside: Any  # added to the second moment; one of the two is zero
    decay: Any
    by1: Any  # inverse bias corrections, 1 for none
    by2: Any
    coupled: bool  # add the decay to the gradient
    decoupled: bool  # add it to the direction

    @classmethod
    def of(cls, work: Work, rule: AdamRule | LambRule, share: float, *, corrects: bool) -> Moments:
        """That of a rule; ``share`` is that of a new gradient in the first moment."""
        is_inside = isinstance(rule, AdamRule) and rule.eps_inside_sqrt
        numbers = work.numbers_as(
            beta1=rule.beta1,
            share=share,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=0.0 if is_inside else rule.eps,
            eps_inside=rule.eps if is_inside else 0.0,
            decay=rule.weight_decay,
            by1=work.correction(rule.beta1, wanted=corrects),
            by2=work.correction(rule.beta2, wanted=corrects),
        )
        return cls(**numbers, **_decays(rule))

    @classmethod
    def of_lamb(cls, work: Work, rule: LambRule) -> Moments:
        """That of LAMB, which is told twice: to measure, and to update."""
        share = 1 - rule.beta1 if rule.grad_averaging else 1.0
        return cls.of(work, rule, share, corrects=rule.bias_correction)


class Sgd(NamedTuple):
    """See `SgdRule`."""

    size: Any
    momentum: Any
    share: Any  # of a new gradient in the momentum
    decay: Any
    is_first: bool
    has_momentum: bool
    nesterov: bool
    decays_before: bool
    decays_after: bool

    @classmethod
    def of(cls, work: Work, rule: SgdRule) -> Sgd:
        """That of a rule."""
        decays, late = rule.weight_decay != 0, rule.decays_after_momentum
        numbers = work.numbers_as(
            size=rule.lr, momentum=rule.momentum, share=1 - rule.dampening, decay=rule.weight_decay
        )
        return cls(
            **numbers,
            is_first=work.step == 1,
            has_momentum=bool(rule.momentum),
            nesterov=bool(rule.nesterov),
            decays_before=bool(decays and not late),
            decays_after=bool(decays and late),
        )


class Lars(NamedTuple):
    """See `LarsRule`."""

    momentum: Any
    decay: Any
    nesterov: bool


class Adagrad(NamedTuple):
    """See `AdagradRule`."""

    size: Any
    eps: Any
    decay: Any
    coupled: bool
    decoupled: bool


class NovoGrad(NamedTuple):
    """See `NovoGradRule`."""

    size: Any
    beta1: Any
    beta3: Any
    decay: Any
    by1: Any
    inside_moment: bool

    @classmethod
    def of(cls, work: Work, rule: NovoGradRule) -> NovoGrad:
        """That of a rule."""
        numbers = work.numbers_as(
            size=rule.lr,
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            decay=rule.weight_decay,
            by1=work.correction(rule.beta1, wanted=rule.bias_correction),
        )
        return cls(**numbers, inside_moment=bool(rule.decays_inside_moment))


def told(work: Work, rule: Rule) -> tuple[Any, Scalar]:
    """The record of a rule, and the number of each tensor, or one for all."""
    match rule:
        case AdamRule():
            corrects = rule.bias_correction is BiasCorrection.MOMENTS
            record = Moments.of(work, rule, 1 - rule.beta1, corrects=corrects)
            return record, _adam_size(work, rule)
        case LambRule():
            return Moments.of_lamb(work, rule), work.numbers_of(rule)
        case SgdRule():
            return Sgd.of(work, rule), 0.0
        case NovoGradRule():
            root = work.correction(rule.beta2, wanted=rule.bias_correction) ** 0.5
            return NovoGrad.of(work, rule), work.numbers_of(rule) * root + rule.eps
        case AdagradRule():
            numbers = work.numbers_as(size=rule.lr, eps=rule.eps, decay=rule.weight_decay)
            return Adagrad(**numbers, **_decays(rule)), 0.0
        case LarsRule():
            numbers = work.numbers_as(momentum=rule.momentum, decay=rule.weight_decay)
            return Lars(**numbers, nesterov=bool(rule.nesterov)), work.numbers_of(rule)
        case _:
            left_out(rule)


def _decays(rule: AdamRule | LambRule | AdagradRule) -> dict[str, bool]:
    """Whether the decay is added to the gradient, or to the direction."""
    decays = rule.weight_decay != 0
    return {
        "coupled": bool(decays and not rule.decoupled),
        "decoupled": bool(decays and rule.decoupled),
    }


def _adam_size(work: Work, rule: AdamRule) -> Scalar:
    """The learning rate, corrected where that is how it is done."""
    if rule.bias_correction is not BiasCorrection.STEP_SIZE:
        return rule.lr
    lr = rule.lr.detach() if isinstance(rule.lr, torch.Tensor) else rule.lr
    root = work.correction(rule.beta2, wanted=True) ** 0.5
    return float(lr) / root * work.correction(rule.beta1, wanted=True)


@part
def direction(p, g, m, v, rule):
    """The direction of a step of a rule with two moments, and the new moments."""
    if rule.coupled:
        g = g + rule.decay * p
    m = rule.beta1 * m + rule.share * g
    v = rule.beta2 * v + rule.beta2_left * g * g
    u = m * rule.by1 / (np.sqrt(v * rule.by2 + rule.eps_inside) + rule.eps)
    if rule.decoupled:
        u = u + rule.decay * p
    return u, m, v


def stepped(p, g, m, number, rule):
    """The new parameter and the new moment of a rule with one."""


@overload(stepped, jit_options=cast("Any", ALWAYS_INLINE))
def _stepped(p, g, m, number, rule):
    return {Sgd: _sgd, Lars: _lars, Adagrad: _adagrad, NovoGrad: _novograd}[rule.instance_class]


def _sgd(p, g, m, number, rule):
    if rule.decays_before:
        g = g + rule.decay * p
    if rule.has_momentum:
        later = rule.momentum * m + rule.share * g
        m = g if rule.is_first else later
        if rule.nesterov:
            g = g + rule.momentum * m
        else:
            g = m
    if rule.decays_after:
        g = g + rule.decay * p
    return p - rule.size * g, m


def _lars(p, g, m, number, rule):
    change = number * (g + rule.decay * p)
    m = rule.momentum * m - change
    if rule.nesterov:
        return p + (rule.momentum * m - change), m
    return p + m, m


def _adagrad(p, g, m, number, rule):
    if rule.coupled:
        g = g + rule.decay * p
    m = m + g * g
    u = g / (np.sqrt(m) + rule.eps)
    if rule.decoupled:
        u = u + rule.decay * p
    return p - rule.size * u, m


def _novograd(p, g, m, number, rule):
    # The number is what the gradient, or the moment, is divided by.
    if rule.inside_moment:
        m = rule.beta1 * m + rule.beta3 * (g / number + rule.decay * p)
        return p - rule.size * (m * rule.by1), m
    m = rule.beta1 * m + rule.beta3 * g
    return p - rule.size * (m * rule.by1 / number + rule.decay * p), m
