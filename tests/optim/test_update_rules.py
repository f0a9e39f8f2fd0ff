# SPDX-License-Identifier: BSD-3-Clause
"""What update rules promise to the bit, whatever their formula: the reference keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.fused import DTYPES, HALVES, gradients, variant_id
from cases.rules import ROWS
from cases.selection import examples
from cases.tolerances import assert_same
from kit.refusals import assert_refused
from preamp.kernels import Update, backend
from preamp.kernels.rules import SgdRule

OPS = backend("reference")
SHAPES = ((3, 2), (), (0,), (2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """One update rule: op, hyper-parameters, how many state lists, and which are norms."""

    op: str
    rule: Any
    states: int = 1
    has_norms: bool = False

    def state(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """State as after some steps."""
        found = []
        for number in range(self.states):
            lists = [g.abs() for g in gradients(SHAPES, 50 + number, dtype)]
            if self.has_norms and number == self.states - 1:
                lists = [torch.tensor(0.5, dtype=dtype) for _ in lists]
            found.append(lists)
        return found


_CHOSEN = (ROWS[2], *{row.op: row for row in ROWS}.values())  # Adam's, and the last of each
RULES = tuple(
    RuleCase(op=row.op, rule=row.rule, states=row.states, has_norms=row.rule.has_numbers)
    for row in _CHOSEN
)


def rule_id(value: Any) -> str | None:
    return value.op if isinstance(value, RuleCase) else variant_id(value)


every_rule = pytest.mark.parametrize("case", RULES, ids=rule_id)


def values(dtype: torch.dtype) -> list[torch.Tensor]:
    return gradients(SHAPES, 7, dtype)


def run(
    case: RuleCase,
    grads: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    rule: Any = None,
    **update: Any,
) -> list[list[torch.Tensor]]:
    """One update of fixed values; returns parameters and state."""
    params, state = values(dtype), case.state(state_dtype)
    update.setdefault("step", 3)
    given = {"rule": rule or case.rule, "update": Update(**update)}
    result = OPS.update_(params, list(grads), *state, **given)
    assert result is None
    return [params, *state]


def assert_same_lists(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> None:
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, f"list {number}, tensor {index}")


@every_rule
@settings(max_examples=examples(20))
@given(exponent=st.integers(-16, 16), dtype=st.sampled_from(DTYPES))
def test_unscaling_on_the_fly_is_exact(case: RuleCase, exponent: int, dtype: torch.dtype) -> None:
    # Multiples of 1/8 below 4, so that float16 holds them at any of these scales.
    plain = [(g * 8).round().clamp(-31, 31) / 8 for g in gradients(SHAPES, 1, torch.float32)]
    scale = 2.0 ** min(exponent, 13)
    scaled = [(grad * scale).to(dtype) for grad in plain]
    assert all(
        torch.equal(s.double() / scale, g.double()) for s, g in zip(scaled, plain, strict=True)
    )
    ours = run(case, scaled, dtype, inv_scale=torch.tensor(1 / scale))
    assert_same_lists(ours, run(case, [grad.to(dtype) for grad in plain], dtype))


@every_rule
def test_small_half_gradients_do_not_underflow(case: RuleCase) -> None:
    """Unscaled in float32, never in the gradient's own dtype."""
    scaled = [torch.full(shape, 2.0**-20, dtype=torch.float16) for shape in SHAPES]
    inv_scale = torch.tensor(2.0**-16)
    ours = run(case, scaled, torch.float32, inv_scale=inv_scale)
    exact = [torch.full(shape, 2.0**-36, dtype=torch.float32) for shape in SHAPES]
    assert_same_lists(ours, run(case, exact, torch.float32))


@every_rule
@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=variant_id)
def test_a_learning_rate_on_the_device(case: RuleCase, lr_dtype: torch.dtype) -> None:
    grads = gradients(SHAPES, 1, torch.float32)
    tensor_lr = replace(case.rule, lr=torch.tensor(0.125, dtype=lr_dtype))
    float_lr = replace(case.rule, lr=0.125)
    assert_same_lists(run(case, grads, rule=tensor_lr), run(case, grads, rule=float_lr))


@every_rule
@pytest.mark.parametrize("dtype", HALVES, ids=variant_id)
def test_half_parameters_are_rounded_once(case: RuleCase, dtype: torch.dtype) -> None:
    """The same update in float32, then rounded, is the update of a half parameter."""
    grads = gradients(SHAPES, 1, dtype)
    halves = run(case, grads, dtype)
    params, state = [p.float() for p in values(dtype)], case.state(torch.float32)
    wide_grads = [grad.float() for grad in grads]
    update = Update(step=3)
    OPS.update_(params, wide_grads, *state, rule=case.rule, update=update)
    assert_same_lists(halves, [[p.to(dtype) for p in params], *state])


@every_rule
def test_lists_of_unequal_length_are_refused(case: RuleCase) -> None:
    grads = gradients(SHAPES, 1, torch.float32)[:-1]
    assert_refused("optim", "lists of unequal length", lambda: run(case, grads))


def test_momentum_starts_with_the_first_gradient() -> None:
    rule = SgdRule(lr=1.0, momentum=0.5, dampening=0.25, weight_decay=0.0, nesterov=False)
    for step, wanted in ((1, 8.0), (2, 6.0), (torch.tensor(1), 8.0), (torch.tensor(2), 6.0)):
        buffer = torch.zeros(1)
        update = Update(step=step)
        OPS.update_([torch.zeros(1)], [torch.full((1,), 8.0)], [buffer], rule=rule, update=update)
        assert buffer.item() == wanted


def test_a_negative_norm_means_none_yet() -> None:
    rule = next(case.rule for case in RULES if case.op == "novograd_")
    for start, wanted in ((-1.0, 5.0), (0.0, 0.5)):
        norm, grad = torch.tensor(start), torch.tensor([3.0, 4.0])
        lists = [torch.ones(2)], [grad], [torch.zeros(2)], [norm]
        OPS.update_(*lists, rule=rule, update=Update(step=1))
        assert norm.item() == pytest.approx(wanted, rel=1e-6)
