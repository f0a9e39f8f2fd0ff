# SPDX-License-Identifier: BSD-3-Clause
"""The half weight is the truth, and its master refines it: updates start from what both say."""

import math
from typing import Any

import pytest
import torch

from cases.back_ends import REFERENCE
from cases.layouts import LAYOUTS
from cases.rules import BF16, F16, F32, F64, ONE_EACH, RuleRow
from cases.stored import assert_bits, copied
from preamp.kernels import Update
from preamp.kernels.stored import taken_over

SHAPES = ((), (0,), (7,), (11, 13), (2000,))
KINDS = [(F32, BF16, BF16), (F32, F16, F16), (F32, F32, BF16), (F64, F16, F16)]
"""dtypes of masters, gradients and half weights."""

kinds = pytest.mark.parametrize("dtypes", KINDS, ids=str)


def written(masters: list[torch.Tensor], half: torch.dtype) -> list[torch.Tensor]:
    """Half weights of masters, of which others have written some; masters change in one place.

    There are zeros of both signs, subnormal ones, infinities and nan, and a master beyond float16.
    """
    halves = [master.to(half) for master in masters]
    masters[3][0, :2] = 1e6
    halves[3][0, :2] = masters[3][0, :2].to(half)
    halves[3][0, 1] = 65504.0
    values = [0.0, -0.0, 2.0**-24, -(2.0**-14), math.inf, math.nan, 3.0]
    halves[2][:] = torch.tensor(values, dtype=half)
    masters[2][:2] = torch.tensor([-0.0, -0.0])
    halves[4][::7] = 0.25
    return halves


def lists_of(row: RuleRow, master: torch.dtype, grad: torch.dtype, layout: Any) -> list[Any]:
    random = torch.Generator().manual_seed(5)
    draw = lambda: [torch.randn(s, generator=random).to(F64) for s in SHAPES]  # noqa: E731
    masters, grads, *state = (draw() for _ in range(2 + row.states))
    state = [[value.abs() for value in column] for column in state]
    if row.rule.has_numbers:
        state[-1] = [torch.tensor(0.5) for _ in SHAPES]
    dtypes = (master, grad, *[master] * row.states)
    return [
        [layout(value.to(dtype)) for value in column]
        for column, dtype in zip((masters, grads, *state), dtypes, strict=True)
    ]


@kinds
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.name)
def test_updates_start_from_both(
    ops: Any, row: RuleRow, layout: Any, dtypes: tuple[Any, ...]
) -> None:
    master, grad, half = dtypes
    lists = lists_of(row, master, grad, layout)
    halves = list(map(layout, written(lists[0], half)))
    told = {"step": 3, "inv_scale": torch.tensor(0.5)}
    found: list[list[torch.Tensor]] = []
    for leads in (True, False):
        own, (weights,) = copied(lists), copied([halves])
        if not leads:  # the same of masters that have taken over, and outputs of any values
            for value, weight in zip(own[0], weights, strict=True):
                value.copy_(taken_over(value, weight))
                weight.fill_(5.0)
        ops.update_(*own, rule=row.rule, update=Update(**told, halves=weights, halves_lead=leads))
        found.append([tensor for column in (*own, weights) for tensor in column])
    if row.rule.takes_norms:  # of tensors that lie differently, whose sums have another order
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert_bits(*found)


@kinds
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_masters_take_over(ops: Any, layout: Any, dtypes: tuple[Any, ...]) -> None:
    masters = [layout(torch.randn(shape).to(dtypes[0])) for shape in SHAPES]
    halves = list(map(layout, written(masters, dtypes[2])))
    wanted = list(map(taken_over, masters, halves))
    (before,) = copied([halves])
    ops.take_over_(masters, halves)
    assert_bits(masters, wanted)
    assert_bits(halves, before)
    for master, half in zip(masters, halves, strict=True):
        assert_bits([master.to(half.dtype)], [half])
    assert masters[3][0, 0] == 1e6, "its half weight is what it rounds to"


@kinds
def test_a_skipped_step_leaves_both(ops: Any, dtypes: tuple[Any, ...]) -> None:
    for row in ONE_EACH:
        lists = lists_of(row, *dtypes[:2], layout=torch.clone)
        halves = written(lists[0], dtypes[2])
        before = copied([*lists, halves])
        update = Update(found_inf=torch.ones(()), halves=halves)
        ops.update_(*lists, rule=row.rule, update=update)
        for one, other in zip((*lists, halves), before, strict=True):
            assert_bits(one, other)


def test_norms_are_of_both(ops: Any) -> None:
    row = next(row for row in ONE_EACH if row.op == "lamb_")
    lists = lists_of(row, F32, BF16, torch.clone)
    halves = [master.to(BF16) * 2 for master in lists[0]]
    found = ops.lamb_norms(*copied(lists), rule=row.rule, update=Update(halves=halves))
    lists[0] = [half.float() for half in halves]
    wanted = REFERENCE.lamb_norms(*lists, rule=row.rule, update=Update())
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
