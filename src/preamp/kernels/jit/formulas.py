# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportMissingTypeStubs=false
"""The formulas of the update rules, compiled by numba.

A rule comes as a record of numbers in the dtype of the computation, and of options, which become a
choice between two results in each lane, so that one machine code serves all. Moments are multiplied
by inverse bias corrections: a division takes a processor as long as a dozen products. `told` makes
the record of a rule.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from numba.extending import overload

from preamp.kernels import formulas
from preamp.kernels.formulas import FORMULAS, bind, terms
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


def _record(name: str, *told: Callable[..., Any], of_tensor: str = "") -> Any:
    """The type of what formulas are ``told`` for all elements; ``of_tensor`` is not among that."""
    fields = {field: None for formula in told for field in inspect.signature(formula).parameters}
    return namedtuple(name, [f for f in fields if f not in {"p", "g", "m", "v", of_tensor}])


Moments: Any = _record("Moments", formulas.moments, formulas.direction)
Sgd: Any = _record("Sgd", formulas.sgd)
Lars: Any = _record("Lars", formulas.lars, of_tensor="size")
Adagrad: Any = _record("Adagrad", formulas.adagrad)
NovoGrad: Any = _record("NovoGrad", formulas.novograd, of_tensor="denominator")


def told(work: Work, rule: Rule) -> tuple[Any, Scalar]:
    """The record of a rule, and the number of each tensor, or one for all."""
    numbers, options = terms(rule)
    match rule:
        case AdamRule():
            return moments(work, rule), _adam_size(work, rule)
        case LambRule():
            return moments(work, rule), work.numbers_of(rule)
        case SgdRule():
            numbers = work.numbers_as(size=rule.lr, **numbers)
            return Sgd(is_first=work.step == 1, **numbers, **options), 0.0
        case NovoGradRule():
            c1, c2 = _corrections(work, rule, wanted=rule.bias_correction)
            numbers = work.numbers_as(size=rule.lr, c1=c1, **numbers)
            return NovoGrad(**numbers, **options), work.numbers_of(rule) * c2**0.5 + rule.eps
        case AdagradRule():
            return Adagrad(**work.numbers_as(size=rule.lr, **numbers), **options), 0.0
        case LarsRule():
            return Lars(**work.numbers_as(**numbers), **options), work.numbers_of(rule)
        case _:
            left_out(rule)


def moments(work: Work, rule: AdamRule | LambRule) -> Any:
    """The record of a rule with two moments; where none is corrected they are multiplied by 1."""
    numbers, options = terms(rule)
    c1, c2 = _corrections(work, rule, wanted=options["CORRECTED"])
    return Moments(**work.numbers_as(c1=c1, c2=c2, **numbers), **(options | {"CORRECTED": True}))


def _corrections(
    work: Work, rule: AdamRule | LambRule | NovoGradRule, *, wanted: bool
) -> tuple[float, float]:
    """The inverse bias corrections of both moments."""
    return work.correction(rule.beta1, wanted=wanted), work.correction(rule.beta2, wanted=wanted)


def _adam_size(work: Work, rule: AdamRule) -> Scalar:
    """The learning rate, corrected where that is how it is done."""
    if rule.bias_correction is not BiasCorrection.STEP_SIZE:
        return rule.lr
    lr = rule.lr.detach() if isinstance(rule.lr, torch.Tensor) else rule.lr
    root = work.correction(rule.beta2, wanted=True) ** 0.5
    return float(lr) / root * work.correction(rule.beta1, wanted=True)


@part
def _times(a, b):
    return a * b


@part
def _over(a, b):
    return a / b


@part
def _choose(condition, a, b):
    return a if condition else b


_moments, _direction, _sgd, _lars, _adagrad, _novograd = (
    part(bind(formula, root=np.sqrt, divide=_over, corrected=_times, choose=_choose))
    for formula in FORMULAS
)


@part
def direction(p, g, m, v, r):
    """The direction of a step of a rule with two moments, and the new moments."""
    m, v = _moments(p, g, m, v, r.beta1, r.share, r.beta2, r.rest, r.decay, r.COUPLED)
    u = _direction(p, m, v, r.c1, r.c2, r.eps, r.decay, r.DECOUPLED, r.CORRECTED, r.EPS_INSIDE)
    return u, m, v


def stepped(p, g, m, number, r):
    """The new parameter and the new moment of a rule with one."""


@overload(stepped, jit_options=cast("Any", ALWAYS_INLINE))
def _stepped(p, g, m, number, r):
    return _STEPPED[r.instance_class]


def _step_sgd(p, g, m, number, r):
    return _sgd(
        p, g, m, r.size, r.is_first, r.momentum, r.share, r.decay,
        r.HAS_MOMENTUM, r.NESTEROV, r.BEFORE, r.AFTER,
    )  # fmt: skip


def _step_lars(p, g, m, number, r):
    return _lars(p, g, m, number, r.momentum, r.decay, r.NESTEROV)


def _step_adagrad(p, g, m, number, r):
    return _adagrad(p, g, m, r.size, r.eps, r.decay, r.COUPLED, r.DECOUPLED)


def _step_novograd(p, g, m, number, r):
    return _novograd(p, g, m, r.size, r.c1, number, r.beta1, r.share, r.decay, r.INSIDE)


_STEPPED = {Sgd: _step_sgd, Lars: _step_lars, Adagrad: _step_adagrad, NovoGrad: _step_novograd}
