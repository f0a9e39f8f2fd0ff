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
from numba.extending import overload

from preamp.kernels.jit.compiler import ALWAYS_INLINE, part
from preamp.kernels.rules import Formula, bound_formulas


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
RECORDS: dict[Formula, Any] = {
    formula: namedtuple(f"{formula.__name__.title()}Record", "told") for formula in _FORMULAS
}
globals().update({record.__name__: record for record in RECORDS.values()})
_BY_RECORD = {RECORDS[formula]: compiled for formula, compiled in _FORMULAS.items()}
_NAMES = {formula: tuple(inspect.signature(formula).parameters) for formula in _FORMULAS}
# Before that come four values of an element or a tensor; three where no gradient is taken.
TOLD = {formula: names[4 if "g" in names else 3 :] for formula, names in _NAMES.items()}
"""By formula the names of what its record has, in order."""

Moments: Any = namedtuple("Moments", "moments direction")
"""The records of both formulas of a rule with two lists of state."""


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
