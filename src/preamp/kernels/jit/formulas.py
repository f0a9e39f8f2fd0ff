# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""The update rules for one element: `preamp.kernels.rules`, each operation rounded on its own.

A rule comes as a record of numbers in the dtype of the computation, and of options, which become a
choice between two results in each lane. Operations come in the order of
`preamp.kernels.reference.formulas`, except that moments are multiplied by inverse bias corrections:
each division takes a processor as long as a dozen products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from preamp.kernels.jit.compiler import ALWAYS_INLINE, part


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


@overload(stepped, jit_options=ALWAYS_INLINE)
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
