# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic
"""The update rules of `preamp.kernels.rules` for one element, written once for every back end.

A formula is a plain function of values, numbers, and options in capitals. torch runs it on whole
tensors, numba and Triton compile it into their kernels. What is written differently there stands
in it as a name that `bind` fills in: `root`, `divide`, `corrected` and `choose`. Every operation
is rounded on its own, in the order in which it is written.

`terms` says what a rule passes for the numbers and options, by the names that they have here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    SgdRule,
    left_out,
)

root: Any = None  # the square root, correctly rounded
divide: Any = None  # the quotient, correctly rounded
corrected: Any = None  # a moment without the bias that its correction stands for
choose: Any = None  # one of two values, by a condition


def bind(formula: Callable[..., Any], **words: Any) -> Any:
    """Return ``formula`` with a back end's ``words`` for `root`, `divide` and the others."""
    bound = types.FunctionType(formula.__code__, {**formula.__globals__, **words}, formula.__name__)
    bound.__module__, bound.__qualname__ = formula.__module__, formula.__qualname__
    return bound


def moments(p, g, m, v, beta1, share, beta2, rest, decay, COUPLED):
    """The new moments of `AdamRule` and `LambRule`."""
    if COUPLED:
        g = g + decay * p
    m = beta1 * m + share * g
    v = beta2 * v + rest * g * g
    return m, v


def direction(p, m, v, c1, c2, eps, decay, DECOUPLED, CORRECTED, EPS_INSIDE):
    """The step of `AdamRule` and `LambRule` before its size, from the new moments."""
    if CORRECTED:
        m = corrected(m, c1)
        v = corrected(v, c2)
    if EPS_INSIDE:
        v = v + eps
    denominator = root(v)
    if not EPS_INSIDE:
        denominator = denominator + eps
    u = divide(m, denominator)
    if DECOUPLED:
        u = u + decay * p
    return u


def sgd(p, g, m, size, is_first, momentum, share, decay, HAS_MOMENTUM, NESTEROV, BEFORE, AFTER):
    """The new parameter and momentum of `SgdRule`; without momentum ``m`` is returned as it is."""
    if BEFORE:
        g = g + decay * p
    if HAS_MOMENTUM:
        later = momentum * m + share * g
        m = choose(is_first, g, later)
        if NESTEROV:
            g = g + momentum * m
        else:
            g = m
    if AFTER:
        g = g + decay * p
    return p - size * g, m


def lars(p, g, m, size, momentum, decay, NESTEROV):
    """The new parameter and momentum of `LarsRule`; ``size`` is the tensor's own."""
    change = size * (g + decay * p)
    m = momentum * m - change
    step = m
    if NESTEROV:
        step = momentum * m - change
    return p + step, m


def adagrad(p, g, m, size, eps, decay, COUPLED, DECOUPLED):
    """The new parameter and sum of `AdagradRule`."""
    if COUPLED:
        g = g + decay * p
    m = m + g * g
    u = divide(g, root(m) + eps)
    if DECOUPLED:
        u = u + decay * p
    return p - size * u, m


def novograd(p, g, m, size, c1, denominator, beta1, share, decay, INSIDE):
    """The new parameter and moment of `NovoGradRule`; ``denominator`` is the tensor's own."""
    if INSIDE:
        g = divide(g, denominator) + decay * p
    m = beta1 * m + share * g
    u = corrected(m, c1)
    if not INSIDE:
        u = divide(u, denominator) + decay * p
    return p - size * u, m


FORMULAS: tuple[Callable[..., Any], ...] = (moments, direction, sgd, lars, adagrad, novograd)
"""All of them, for a back end to bind."""


def terms(rule: Rule) -> tuple[dict[str, float], dict[str, bool]]:
    """Numbers and options that ``rule`` passes to its formula, by name.

    What depends on the step or the tensor is not among them: ``size``, ``is_first``, ``c1``,
    ``c2``, ``denominator``.
    """
    match rule:
        case AdamRule() | LambRule():
            averages = isinstance(rule, AdamRule) or rule.grad_averaging
            numbers = {
                "beta1": rule.beta1,
                "share": 1 - rule.beta1 if averages else 1.0,
                "beta2": rule.beta2,
                "rest": 1 - rule.beta2,
                "eps": rule.eps,
            }
            correction = rule.bias_correction
            options = {
                **_decays(rule),
                "CORRECTED": correction is True or correction is BiasCorrection.MOMENTS,
                "EPS_INSIDE": isinstance(rule, AdamRule) and rule.eps_inside_sqrt,
            }
        case SgdRule():
            numbers = {"momentum": rule.momentum, "share": 1 - rule.dampening}
            decays, late = rule.weight_decay != 0, rule.decays_after_momentum
            options = {"HAS_MOMENTUM": rule.momentum != 0, "NESTEROV": rule.nesterov}
            options |= {"BEFORE": decays and not late, "AFTER": decays and late}
        case LarsRule():
            numbers, options = {"momentum": rule.momentum}, {"NESTEROV": rule.nesterov}
        case AdagradRule():
            numbers, options = {"eps": rule.eps}, _decays(rule)
        case NovoGradRule():
            share = 1 - rule.beta1 if rule.grad_averaging else 1.0
            numbers = {"beta1": rule.beta1, "share": share}
            options = {"INSIDE": rule.decays_inside_moment}
        case _:
            left_out(rule)
    numbers["decay"] = rule.weight_decay
    return numbers, {name: bool(value) for name, value in options.items()}


def _decays(rule: AdamRule | LambRule | AdagradRule) -> dict[str, bool]:
    """Whether the decay is added to the gradient, or to the step."""
    decays = rule.weight_decay != 0
    return {"COUPLED": decays and not rule.decoupled, "DECOUPLED": decays and rule.decoupled}
