# SPDX-License-Identifier: BSD-3-Clause
"""Rules that are told the norms of larger tensors than the ones they update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.back_ends import REFERENCE
from preamp.kernels import Update
from preamp.kernels.rules import LambRule, LarsRule, NovoGradRule

SHAPES = ((3, 5), (0,), (1200,), (7,))
LAMB = LambRule(
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=1e-6,
    weight_decay=0.01,
    decoupled=True,
    bias_correction=True,
    grad_averaging=True,
    uses_trust_ratio=True,
)
LARS = LarsRule(
    lr=0.1,
    momentum=0.9,
    weight_decay=0.01,
    nesterov=False,
    trust_coefficient=0.02,
    eps=1e-8,
    uses_trust_ratio=True,
)
NOVOGRAD = NovoGradRule(
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.01,
    bias_correction=True,
    grad_averaging=True,
    decays_inside_moment=False,
    uses_max_norm=False,
)
RULES = {"lamb_": (LAMB, 2, 2), "lars_": (LARS, 1, 2), "novograd_": (NOVOGRAD, 1, 1)}


def lists(states: int, *, odd: bool = False) -> list[list[torch.Tensor]]:
    """Parameters, gradients and state; with ``odd``, one gradient lies in another order."""
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2 + states)]
    rows[2:] = [[value.abs() for value in row] for row in rows[2:]]
    if odd:
        rows[1][0] = rows[1][0].t().contiguous().t()
    return rows


def run(ops: Any, op: str, *, odd: bool) -> list[torch.Tensor]:
    rule, states, kinds = RULES[op]
    rows = lists(states, odd=odd)
    if op == "novograd_":
        rows.append([torch.tensor(value) for value in (-1.0, -1.0, 2.0, 3.0)])
    norms = torch.arange(1.0, 1.0 + kinds * len(SHAPES)).view(kinds, -1)
    update = Update(inv_scale=torch.tensor(0.5), norms=norms)
    ops.update_(*rows, rule=rule, update=update)
    return [tensor for place, row in enumerate(rows) if place != 1 for tensor in row]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("op", RULES)
def test_given_norms_are_taken(ops: Any, op: str, odd: bool) -> None:
    pairs = zip(run(ops, op, odd=odd), run(REFERENCE, op, odd=odd), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("odd", [False, True])
def test_measured_norms(ops: Any, odd: bool) -> None:
    rows = lists(2, odd=odd)
    update = Update(step=3, inv_scale=torch.tensor(0.5))
    found = ops.lamb_norms(*rows, rule=LAMB, update=update)
    assert found.shape == (2, len(SHAPES))
    assert float(found[:, 1].abs().max()) == 0.0
    wanted = REFERENCE.lamb_norms(*rows, rule=LAMB, update=update)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("op", RULES)
def test_own_norms_given_change_nothing(ops: Any, op: str) -> None:
    """Told the norms that it would measure, a rule does what it does without."""
    rule, states, _ = RULES[op]
    results: list[list[torch.Tensor]] = []
    for given in (True, False):
        rows = lists(states)
        measured = [torch.stack([value.norm() for value in rows[place]]) for place in (0, 1)]
        norms = {"lars_": torch.stack(measured), "novograd_": measured[1][None]}.get(op)
        if op == "novograd_":
            rows.append([torch.tensor(2.0) for _ in SHAPES])
        if op == "lamb_":
            norms = ops.lamb_norms(*rows, rule=rule, update=Update())
        ops.update_(*rows, rule=rule, update=Update(norms=norms if given else None))
        results.append([tensor for row in rows for tensor in row])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
