# SPDX-License-Identifier: BSD-3-Clause
"""What every update rule of the op table promises, whatever its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.fused import DTYPES, HALVES, gradients, variant_id, wide
from cases.rules import ROWS
from cases.selection import examples
from cases.tolerances import assert_same
from preamp.kernels import Update, backend
from preamp.kernels import rules as kernel_rules
from preamp.kernels.rules import AdamRule, BiasCorrection, SgdRule

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
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=variant_id)


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


def test_every_rule_of_the_table_has_a_row() -> None:
    assert {type(case.rule) for case in RULES} == set(kernel_rules.RULES)


@every_dtype
@every_rule
@pytest.mark.parametrize("value", [1.0, 4.0, math.inf, math.nan])
def test_found_inf_keeps_every_bit(case: RuleCase, dtype: torch.dtype, value: float) -> None:
    params, state = values(dtype), case.state(dtype)
    params[0].view(-1)[1] = math.nan  # what was broken before stays broken in the same way
    halves: list[Any] = [p.bfloat16() + 1 for p in params]
    before = [[t.clone() for t in tensors] for tensors in (params, *state, halves)]
    grads = [torch.full_like(p, math.inf) for p in params]
    update = Update(step=1, found_inf=torch.tensor(value), halves=halves)
    OPS.update_(params, grads, *state, rule=case.rule, update=update)
    assert_same_lists([params, *state, halves], before)


@every_dtype
@every_rule
def test_a_clean_flag_changes_nothing(case: RuleCase, dtype: torch.dtype) -> None:
    grads = gradients(SHAPES, 1, dtype)
    flagged = run(case, grads, dtype, found_inf=torch.tensor(0.0))
    assert_same_lists(flagged, run(case, grads, dtype))


@pytest.mark.apex("7 FusedLAMB", "10 A-14")
@every_dtype
@every_rule
def test_gradients_survive(case: RuleCase, dtype: torch.dtype) -> None:
    grads = gradients(SHAPES, 1, dtype)
    before = [grad.clone() for grad in grads]
    run(case, grads, dtype, inv_scale=torch.tensor(0.5))
    assert_same_lists([grads], [before])


@every_rule
@every_dtype
@pytest.mark.parametrize("half", HALVES, ids=variant_id)
def test_halves_are_the_rounded_parameters(
    case: RuleCase, dtype: torch.dtype, half: torch.dtype
) -> None:
    grads = gradients(SHAPES, 1, dtype)
    halves: list[Any] = [torch.full(shape, math.nan, dtype=half) for shape in SHAPES]
    halves[1] = None
    params, *state = run(case, grads, dtype, halves=halves)
    for param, rounded in zip(params, halves, strict=True):
        if rounded is not None:
            assert_same(rounded, param.to(half))
    assert_same_lists([params, *state], run(case, grads, dtype))


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


@every_dtype
@every_rule
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_step_on_the_device(case: RuleCase, dtype: torch.dtype, step: int) -> None:
    grads = gradients(SHAPES, 1, dtype)
    counted = torch.tensor(step, dtype=torch.int32)
    ours = run(case, grads, dtype, wide(dtype), step=counted)
    theirs = run(case, grads, dtype, wide(dtype), step=step)
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            ulp = torch.finfo(dtype).eps  # of the terms, which are about one and may cancel
            assert torch.allclose(a, b, rtol=4 * ulp, atol=4 * ulp)


@every_rule
@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=variant_id)
def test_a_learning_rate_on_the_device(case: RuleCase, lr_dtype: torch.dtype) -> None:
    grads = gradients(SHAPES, 1, torch.float32)
    tensor_lr = replace(case.rule, lr=torch.tensor(0.125, dtype=lr_dtype))
    float_lr = replace(case.rule, lr=0.125)
    assert_same_lists(run(case, grads, rule=tensor_lr), run(case, grads, rule=float_lr))


@pytest.mark.apex("7.0 rounding of half parameters")
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
def test_nothing_is_recorded_for_autograd(case: RuleCase) -> None:
    params = [value.requires_grad_() for value in values(torch.float32)]
    grads = gradients(SHAPES, 1, torch.float32)
    update = Update(step=1, found_inf=torch.tensor(0.0))
    state = case.state(torch.float32)
    OPS.update_(params, grads, *state, rule=case.rule, update=update)
    assert all(param.is_leaf and param.requires_grad for param in params)
    assert not any(tensor.requires_grad for tensors in state for tensor in tensors)


@every_rule
def test_lists_of_unequal_length_are_refused(case: RuleCase) -> None:
    grads = gradients(SHAPES, 1, torch.float32)[:-1]
    with pytest.raises(ValueError, match=r"Lists of .* tensors were given"):
        run(case, grads)


@every_rule
def test_no_tensors_at_all(case: RuleCase) -> None:
    empty = [[] for _ in range(case.states)]
    OPS.update_([], [], *empty, rule=case.rule, update=Update(step=1))


@every_dtype
def test_bias_corrections_keep_their_digits(dtype: torch.dtype) -> None:
    """1 - 0.999 in float32 would be off by 1e-5; one step of Adam shows it."""
    rule = AdamRule(
        lr=1.0,
        beta1=0.0,
        beta2=0.999,
        eps=0.0,
        weight_decay=0.0,
        decoupled=True,
        bias_correction=BiasCorrection.MOMENTS,
    )
    kept = wide(dtype)
    param, grad = torch.zeros(1, dtype=kept), torch.full((1,), 3.0, dtype=dtype)
    state = [torch.zeros(1, dtype=kept)], [torch.zeros(1, dtype=kept)]
    OPS.update_([param], [grad], *state, rule=rule, update=Update(step=torch.tensor(1)))
    assert abs(param.item() + 1.0) < 8 * torch.finfo(kept).eps


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
