# SPDX-License-Identifier: BSD-3-Clause
"""From forecasts to problems that make a level unfit or tight, and which of the levels to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from preamp.core.dtypes import dtype_name
from preamp.kernels.wide_half import cpu_lacks_matmul
from preamp.numerics import FORMATS, NumberFormat, is_eps_zero
from preamp.optim.fused.base import FusedOptimizer
from preamp.planning.forecast import MARGIN, Range, TensorForecast, forecast, starting_scale
from preamp.planning.ranges import Places
from preamp.planning.report import LevelPlan, PlanProblem, ProblemKind
from preamp.planning.verify import FOLLOWED, STALLING, Trained, Verification
from preamp.policy import OPT_LEVELS, Policy

LOST_LIMIT = 0.1  # share of what does something in a gradient that may vanish
TOO_FAR = 1.5  # movement along float32's, as a multiple of it, from which a level is tight
STALL_LIMIT = 0.25  # share of all updates that may round to nothing before it is a problem


def held_ranges(ranges: Sequence[Range], places: Places, policy: Policy) -> list[Range]:
    """The recorded tensors that a level has in half; updates where no master takes them."""
    return [
        values
        for values in ranges
        if places.holds(values) and not (values.what == "update" and policy.master_weights)
    ]


def scale_for(ranges: Sequence[Range], form: NumberFormat) -> float:
    """The loss scale to start with: 1 for bfloat16, which has float32's range."""
    if form.name != "float16":
        return 1.0
    gradients = [values.max_abs for values in ranges if values.what == "gradient"]
    return starting_scale(max(gradients, default=0.0), form)


def forecasts(
    ranges: Sequence[Range], form: NumberFormat, scale: float
) -> tuple[TensorForecast, ...]:
    """Put all of them into the format; the most endangered first."""
    found = [forecast(values, form, scale) for values in ranges]
    return tuple(sorted(found, key=lambda f: (not f.overflows, -f.lost_share, f.name)))


def problems_of(
    tensors: Sequence[TensorForecast], form: NumberFormat, scale: float, noise: Collection[str] = ()
) -> tuple[PlanProblem, ...]:
    """Say what is wrong, the worst first; ``noise`` names gradients that are rounding error."""
    found = [_overflow(t, form) for t in tensors if t.overflows]
    found += [
        _underflow(t, form, scale)
        for t in tensors
        if t.what == "gradient" and t.lost_share > LOST_LIMIT and t.name not in noise
    ]
    updates = [t for t in tensors if t.what == "update"]
    stalled = sum(t.stalled or 0 for t in updates)
    moving = sum(t.nonzero for t in updates)
    if stalled > STALL_LIMIT * moving:
        found.append(
            PlanProblem(
                kind="stall",
                name="",
                text=(
                    f"{stalled / moving:.0%} of the updates are too small to change a "
                    f"{form.name} weight, which has {form.mantissa_bits + 1} significant bits; "
                    "float32 masters would keep them."
                ),
            )
        )
    return tuple(found)


def eps_problem(optimizer: torch.optim.Optimizer, policy: Policy) -> tuple[PlanProblem, ...]:
    """Say where an optimizer that computes in half divides by a root plus an eps of zero."""
    half = policy.cast_model_type
    if half is None or policy.master_weights or isinstance(optimizer, FusedOptimizer):
        return ()
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        if is_eps_zero(group, FORMATS[dtype_name(half)]):
            name, form = type(optimizer).__name__, dtype_name(half)
            text = (
                f"{name}'s eps of {group['eps']:g} is zero in {form}: a weight whose squared "
                "gradient vanishes is divided by zero. Pass eps=1e-4, or keep float32 masters."
            )
            return (PlanProblem(kind="optimizer", name="", text=text),)
    return ()


def is_tight(
    tensors: Sequence[TensorForecast], form: NumberFormat, noise: Collection[str] = ()
) -> bool:
    """Whether float16 fits with little room; bfloat16 never is."""
    if form.name != "float16":
        return False
    little = any(t.headroom is not None and t.headroom < MARGIN for t in tensors)
    return little or any(
        t.what == "gradient" and t.lost_share > LOST_LIMIT / 10 and t.name not in noise
        for t in tensors
    )


def _overflow(tensor: TensorForecast, form: NumberFormat) -> PlanProblem:
    is_gradient = tensor.what == "gradient"
    what = {"gradient": "The gradient of ", "update": "The update of "}.get(tensor.what, "")
    return PlanProblem(
        kind="gradient overflow" if is_gradient else "overflow",
        name=tensor.name,
        text=(
            f"{what}{tensor.name} reaches {tensor.max_abs:.3g}; {form.name} ends at "
            f"{form.largest:.5g}."
        ),
    )


def settle(plan: LevelPlan, trained: Trained, result: Verification) -> LevelPlan:
    """Let what was tried decide about what was forecast, as far as it can.

    ``result`` compares ``trained`` with float32. A forecast that did not come true in the steps
    becomes a note, except those of what the steps do not use or do not reach.
    """
    plan = dataclasses.replace(plan, verification=result)
    found = departures(result, plan, shrinks=not trained.has_squares)
    if found is not None:
        return dataclasses.replace(plan, problems=(*plan.problems, found))  # the cause first
    stored = {t.name for t in plan.tensors if t.what == "weight"}
    lasting = [
        problem
        for problem in plan.problems
        if (problem.kind == "overflow" and problem.name in stored)
        or (problem.kind == "optimizer" and trained.has_half_squares)
    ]
    steps = len(result.losses)
    notes = [
        f"Forecast, but without effect in {steps} steps: {problem.text}"
        for problem in plan.problems
        if problem not in lasting
    ]
    if result.distance > result.allowed / 2:
        notes.append(f"Near the limit: {_distance(result)}")
    if not FOLLOWED <= result.followed <= TOO_FAR:
        notes.append(_way(result))
    is_tight = plan.is_tight or bool(notes)
    return dataclasses.replace(plan, problems=tuple(lasting), notes=tuple(notes), is_tight=is_tight)


def departures(result: Verification, plan: LevelPlan, *, shrinks: bool) -> PlanProblem | None:
    """Say how a training at a level did not follow float32's; ``None`` if it did.

    ``shrinks`` says that updates become smaller as gradients do.
    """
    steps = len(result.losses)
    if not math.isfinite(result.reached):
        return _measured("losses", f"In {steps} steps the loss or a weight became infinite or nan.")
    if result.skipped == steps:
        return _measured(
            "losses",
            f"All {steps} steps tried were skipped, from a loss scale of {plan.loss_scale:,.0f} "
            "on, because gradients overflowed.",
        )
    if not result.holds:
        return _measured("losses", _distance(result))
    # Half weights may stand still because their steps are small, not their gradients: in few
    # parameters that does little harm, which is what ``followed`` weighs.
    lost = {t.name for t in plan.tensors if t.what == "gradient" and t.lost_share > LOST_LIMIT}
    frozen = [name for name in result.frozen if _has_float32_weights(plan) or name in lost]
    if frozen:
        more = f", and so did {len(frozen) - 1} more" if len(frozen) > 1 else ""
        text = f"In {steps} steps {frozen[0]} moved less than half as far as in float32{more}."
        return _measured("underflow", text, frozen[0])
    # Float32 weights do not stand still: they went somewhere else, where the losses are as good.
    # A stall that was forecast and shows already grows where updates shrink with the gradients.
    stalls = shrinks and any(problem.kind == "stall" for problem in plan.problems)
    if result.followed < (STALLING if stalls else FOLLOWED) and not _has_float32_weights(plan):
        return _measured("stall", _way(result))
    return None


def _way(result: Verification) -> str:
    return f"In {len(result.losses)} steps the weights went {result.followed:.0%} of float32's way."


def _measured(kind: ProblemKind, text: str, name: str = "") -> PlanProblem:
    return PlanProblem(kind=kind, name=name, text=text, was_tried=True)


def _distance(result: Verification) -> str:
    steps = len(result.losses)
    is_mean = (steps - result.skipped or steps) > 4  # a quarter has more than one step
    part = "averaged over a quarter of them" if is_mean else "at one of them"
    return (
        f"In {steps} steps the loss, {part}, came to {result.reached:.4g} where float32's came to "
        f"{result.expected:.4g}; up to {result.allowed:.2g} away is near."
    )


def _underflow(tensor: TensorForecast, form: NumberFormat, scale: float) -> PlanProblem:
    return PlanProblem(
        kind="underflow",
        name=tensor.name,
        text=(
            f"{tensor.lost_share:.0%} of what counts in the gradient of {tensor.name} lies below "
            f"{form.name}'s smallest value {form.smallest_subnormal:.2g} at loss scale "
            f"{scale:,.0f}."
        ),
    )


ORDER = ("O5", "O2", "O4", "O1", "O3")
SLOW_BFLOAT16 = ("O2", "O5", "O1", "O4", "O3")


def candidates(levels: Mapping[str, LevelPlan], *, is_slow: bool = False) -> list[str]:
    """The opt levels that fit, best first.

    O5, which needs no loss scale and has float32's range; O2 where O5 does not fit, or where
    products in bfloat16 are slow (``is_slow``). Then those whose weights stay float32, and last
    those without any float32 weights.
    """
    order = SLOW_BFLOAT16 if is_slow else ORDER
    return [name for name in order if name in levels and levels[name].fits]


def is_slow_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has units that multiply matrices in float16, and none for bfloat16."""
    if device.type == "cuda" and torch.version.hip is None:
        return (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)
    return (
        device.type == "cpu"
        and cpu_lacks_matmul(torch.bfloat16)
        and not cpu_lacks_matmul(torch.float16)
    )


def _has_float32_weights(plan: LevelPlan) -> bool:
    policy = OPT_LEVELS.get(plan.level)
    return policy is not None and (policy.master_weights or policy.cast_model_type is None)


def reasons_for(
    recommended: str, levels: Mapping[str, LevelPlan], *, is_slow: bool = False
) -> tuple[str, ...]:
    """Say why, with the numbers."""
    if recommended not in levels:
        return ("No level fits, so O0 (float32) is what is left; the problems are listed below.",)
    best = levels[recommended]
    found = [_choice(recommended, levels, is_slow=is_slow), _fits(best)]
    if best.half == "float16":
        found.append(_scaling(best))
    if best.verification is not None:
        skipped = best.verification.skipped
        found.append(f"{_distance(best.verification)} {skipped} of the steps were skipped.")
    return tuple(found)


def _choice(best: str, levels: Mapping[str, LevelPlan], *, is_slow: bool) -> str:
    """Which case of `candidates` it is."""
    order = SLOW_BFLOAT16 if is_slow else ORDER
    before = order[: order.index(best)]
    slow = "products in bfloat16 are slow on this device"
    if not before:
        return f"O2, since {slow}." if is_slow else "O5 is where to start, and it fits."
    misfits = [name for name in before if name in levels]
    if not misfits:
        return f"{best} is the first level in the order {', '.join(order)} that was looked at."
    return f"{best}, since {' and '.join(misfits)} {'do' if misfits[1:] else 'does'} not fit."


def _fits(plan: LevelPlan) -> str:
    overflowing = [t.name for t in plan.tensors if t.overflows]
    if overflowing:
        return (
            f"Of what {plan.level} has in half, {len(overflowing)} overflow {plan.half}, such as "
            f"{overflowing[0]}, without effect in the steps tried."
        )
    room = [t.headroom for t in plan.tensors if t.headroom is not None and t.what != "update"]
    left = f"at least {min(room):.1f} powers of two above the largest value seen" if room else ""
    return f"In {plan.half} nothing that {plan.level} has in half overflows: {left or 'no value'}."


def _scaling(plan: LevelPlan) -> str:
    gradients = [t for t in plan.tensors if t.what == "gradient"]
    nonzero = sum(t.nonzero for t in gradients)
    if not nonzero:
        return "No gradient is half, so the loss scale does not matter."
    lost = sum(t.lost for t in gradients) / nonzero
    without = sum(t.lost_unscaled for t in gradients) / nonzero
    largest = max(t.max_abs for t in gradients)
    return (
        f"The largest gradient is {largest:.2g}. Without a loss scale {without:.1%} of the "
        f"gradients' elements would vanish; at {plan.loss_scale:,.0f} {lost:.1%} do."
    )
