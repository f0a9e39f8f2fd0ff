# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportMissingTypeStubs=false
"""The formulas of the update rules, compiled by numba.

What a formula is told of all elements comes as a record: numbers in the dtype of the computation,
and options, which become a choice between two results in each lane, so that one machine code serves
all. The type of a record says which formula is meant. Moments are multiplied by inverse bias
corrections: a division takes a processor as long as a dozen products.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from typing import Any, cast

import numpy as np
import torch
from numba.extending import overload

from preamp.kernels.jit.compiler import ALWAYS_INLINE, part
from preamp.kernels.rules import (
    RULES,
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


@part
def _times(a, b):
    return a * b


@part
def _over(a, b):
    return a / b


@part
def _choose(condition, a, b):
    return a if condition else b


_FORMULAS = bound_formulas(part, root=np.sqrt, divide=_over, corrected=_times, choose=_choose)
# By formula the type of its record, whose only field is a tuple of all that it is told. Names of
# this module: numba pickles other classes by value, and each process that reads these sees a new
# type and compiles again.
_RECORDS: dict[Formula, Any] = {
    formula: namedtuple(f"{formula.__name__.title()}Record", "told") for formula in _FORMULAS
}
globals().update({record.__name__: record for record in _RECORDS.values()})
_BY_RECORD = {_RECORDS[formula]: compiled for formula, compiled in _FORMULAS.items()}
_NAMES = {formula: tuple(inspect.signature(formula).parameters) for formula in _FORMULAS}

Moments: Any = namedtuple("Moments", "moments direction")
"""The records of both formulas of a rule with two lists of state."""

_OF_ELEMENTS = frozenset("pgmv")
# A formula that is a rule's only one takes the number of the tensor after the element's values.
_OF_TENSORS = {rule.formulas[0]: _NAMES[rule.formulas[0]][3] for rule in RULES
               if len(rule.formulas) == 1}  # fmt: skip


def record_of(work: Any, rule: Rule) -> Any:
    """What the rule's formulas are told of all elements; ``work`` is a `Launch`."""
    check_known(rule)
    numbers, options = cast("tuple[dict[str, Any], dict[str, Any]]", rule.terms)
    if isinstance(rule, (AdamRule, LambRule, NovoGradRule)):
        # Moments that are not corrected are multiplied by 1.
        wanted, options["CORRECTED"] = options.get("CORRECTED", rule.corrects), True
        numbers["c1"] = work.correction(rule.beta1, wanted=wanted)
        numbers["c2"] = work.correction(rule.beta2, wanted=wanted)
    numbers = work.numbers_as(size=rule.lr, **numbers)
    given = {**numbers, **options, "is_first": work.step == 1}
    records = [
        _RECORDS[formula](
            tuple(
                given[name]
                for name in _NAMES[formula]
                if name not in _OF_ELEMENTS and name != _OF_TENSORS.get(formula)
            )
        )
        for formula in rule.formulas
    ]
    return records[0] if len(records) == 1 else Moments(*records)


def number_of(work: Any, rule: Rule) -> Scalar:
    """The number of each tensor, or one for all: of NovoGrad a denominator, else a step's size."""
    if isinstance(rule, (LambRule, LarsRule)):
        return work.numbers_of(rule)
    if isinstance(rule, NovoGradRule):
        c2 = work.correction(rule.beta2, wanted=rule.corrects)
        return work.numbers_of(rule) * c2**0.5 + rule.eps
    if isinstance(rule, AdamRule) and rule.bias_correction is BiasCorrection.STEP_SIZE:
        lr = rule.lr.detach() if isinstance(rule.lr, torch.Tensor) else rule.lr
        root = work.correction(rule.beta2, wanted=True) ** 0.5
        return float(lr) / root * work.correction(rule.beta1, wanted=True)
    return rule.lr


def direction(p, g, m, v, r) -> Any:
    """The step of a rule with two lists of state before its size, and the new state."""


@overload(direction, jit_options=cast("Any", ALWAYS_INLINE))
def _direction(p, g, m, v, r):
    moments, step = (_BY_RECORD[record.instance_class] for record in r.types)

    def with_both(p, g, m, v, r):
        m, v = moments(p, g, m, v, *r.moments.told)
        return step(p, m, v, *r.direction.told), m, v

    return with_both


def stepped(p, g, m, v, number, r) -> Any:
    """The new parameter and state of any rule; without a second list ``v`` stays as it is."""


@overload(stepped, jit_options=cast("Any", ALWAYS_INLINE))
def _stepped(p, g, m, v, number, r):
    if r.instance_class is Moments:

        def with_two(p, g, m, v, number, r):
            u, m, v = direction(p, g, m, v, r)
            return p - number * u, m, v

        return with_two
    formula = _BY_RECORD[r.instance_class]

    def with_one(p, g, m, v, number, r):
        p, m = formula(p, g, m, number, *r.told)
        return p, m, v

    return with_one
