# SPDX-License-Identifier: BSD-3-Clause
"""Which level to take: the order of those that fit, and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from preamp.planning.report import LevelPlan, bytes_text, problem_lines
from preamp.policy import OPT_LEVELS

CLOSE = 1.1
"""Levels whose bytes moved differ by less than this factor count as equally fast."""


def candidates(levels: Mapping[str, LevelPlan]) -> list[str]:
    """The opt levels that fit, best first.

    Those that update float32 weights come before those that do not, roomy ones before tight ones,
    and then those that move clearly fewer bytes. Among equals float16 wins, which has 11
    significant bits where bfloat16 has 8.
    """
    fitting = [p for name, p in levels.items() if p.fits and name in OPT_LEVELS]
    least = min((plan.moved for plan in fitting), default=0)

    def rank(plan: LevelPlan) -> tuple[bool, bool, int, bool, float]:
        policy = OPT_LEVELS[plan.level]
        keeps_digits = policy.master_weights or policy.cast_model_type is None
        cost = math.floor(math.log(max(plan.moved, 1) / max(least, 1), CLOSE))
        return not keeps_digits, plan.is_tight, cost, plan.half != "float16", plan.moved

    return [plan.level for plan in sorted(fitting, key=rank)]


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
            f"{verification.deviation:.2%} of float32's losses, relative to the first one; "
            f"{verification.skipped} were skipped."
        )
    found += [_instead(plan, best) for plan in levels.values() if plan.level != recommended]
    return tuple(found)


def _fits(plan: LevelPlan) -> str:
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
        exact = "has more digits" if best.half != plan.half else "moves fewer bytes"
        return f"{plan.level} fits too; {best.level} {exact}."
    return f"{plan.level} fits too, but moves {bytes_text(plan.moved)} instead of " + (
        f"{bytes_text(best.moved)} in a step."
    )
