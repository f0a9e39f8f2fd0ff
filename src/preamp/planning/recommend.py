# SPDX-License-Identifier: BSD-3-Clause
"""From forecasts to problems that make a level unfit or tight, and which of the levels to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from preamp.core.dtypes import dtype_name
from preamp.numerics import FORMATS, NumberFormat, is_eps_zero
from preamp.optim.fused.base import FusedOptimizer
from preamp.planning.forecast import MARGIN, Range, TensorForecast, forecast, starting_scale
from preamp.planning.ranges import Places
from preamp.planning.report import LevelPlan, PlanProblem, ProblemKind, bytes_text, problem_lines
from preamp.planning.verify import FOLLOWED, NEAR, STALLING, SUNK, TOLERANCE, Trained, Verification
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
    if result.is_near:
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
    if not all(map(math.isfinite, result.losses)) or not math.isfinite(result.deviation):
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
    text = (
        f"In {len(result.losses)} steps the loss came {result.deviation:.1%} of its largest value "
        "away from float32's; "
    )
    if result.sunk is None:
        return text + f"{TOLERANCE:.0%} is expected, {NEAR * TOLERANCE:.0%} allowed."
    return text + f"it fell {result.sunk:.0%} as far, and has to fall {SUNK:.0%}."


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


CLOSE = 1.1  # levels whose bytes moved differ by less than this factor count as equally fast


def candidates(levels: Mapping[str, LevelPlan]) -> list[str]:
    """The opt levels that fit, best first.

    Those that update float32 weights come before those that do not, roomy ones before tight ones,
    and then those that move clearly fewer bytes. Of those within `CLOSE` of the fewest, float16
    wins, which has 11 significant bits where bfloat16 has 8.
    """
    rest = [plan for name, plan in levels.items() if plan.fits and name in OPT_LEVELS]
    found: list[str] = []
    while rest:
        first = min(map(_rank, rest))
        best = _cheapest([plan for plan in rest if _rank(plan) == first])
        rest.remove(best)
        found.append(best.level)
    return found


def _has_float32_weights(plan: LevelPlan) -> bool:
    policy = OPT_LEVELS.get(plan.level)
    return policy is not None and (policy.master_weights or policy.cast_model_type is None)


def _rank(plan: LevelPlan) -> tuple[bool, bool]:
    return not _has_float32_weights(plan), plan.is_tight


def _cheapest(plans: Sequence[LevelPlan]) -> LevelPlan:
    # Compared with the cheapest one, not by classes of costs: two that hardly differ could lie on
    # both sides of the border between two classes.
    least = min(plan.moved for plan in plans)
    close = (plan for plan in plans if plan.moved <= least * CLOSE)
    return min(close, key=lambda plan: (plan.half != "float16", plan.moved))


def reasons_for(
    recommended: str, levels: Mapping[str, LevelPlan], order: Sequence[str]
) -> tuple[str, ...]:
    """Say why, with the numbers."""
    if not order:
        return ("No level fits, so O0 (float32) is what is left; the problems are listed below.",)
    best = levels[recommended]
    found = [_fits(best)]
    if best.half == "float16":
        found.append(_scaling(best))
    verification = best.verification
    if verification is not None:
        found.append(
            f"{len(verification.losses)} steps at {recommended} stayed within "
            f"{verification.deviation:.2%} of float32's losses, relative to the largest one; "
            f"{verification.skipped} were skipped."
        )
    found += [_instead(plan, best) for plan in levels.values() if plan.level != recommended]
    return tuple(found)


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


def _instead(plan: LevelPlan, best: LevelPlan) -> str:
    if not plan.fits:
        return f"{plan.level} does not fit: {problem_lines(plan.problems)[0]}"
    if plan.level not in OPT_LEVELS:
        updates = [t for t in plan.tensors if t.what == "update"]
        lost = sum(t.stalled or 0 for t in updates) / max(sum(t.nonzero for t in updates), 1)
        return f"{plan.level} loses only {lost:.0%} of the updates to rounding in these steps."
    policy = OPT_LEVELS[plan.level]
    if policy.cast_model_type is not None and not policy.master_weights:
        return f"{plan.level} fits in these steps, but has no float32 weights to fall back on."
    if plan.is_tight and not best.is_tight:
        return f"{plan.level} fits with little room."
    if plan.moved < best.moved * CLOSE:
        if best.half == "float16" != plan.half:
            return f"{plan.level} fits too; {best.level} has more digits."
        fewer = "fewer" if best.moved < plan.moved else "no more"
        return f"{plan.level} fits too; {best.level} moves {fewer} bytes."
    return f"{plan.level} fits too, but moves {bytes_text(plan.moved)} instead of " + (
        f"{bytes_text(best.moved)} in a step."
    )
