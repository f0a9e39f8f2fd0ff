# SPDX-License-Identifier: BSD-3-Clause
"""All rules, and which of them are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from preamp.core.errors import bad_value
from preamp.doctor.detector import Detector
from preamp.doctor.rule import Rule
from preamp.doctor.rules.half_compute import BatchNorm, CachedCasts, HalfLoss
from preamp.doctor.rules.half_weights import Averages, Eps, LostUpdates
from preamp.doctor.rules.loss_scale import Clipping, Scheduling, Stepping
from preamp.doctor.rules.outcome import Outcome
from preamp.doctor.rules.parameters import Accumulation, Frozen, Masters, Membership
from preamp.doctor.rules.scaler import Saving, ScalerUse

DETECTORS: Final[tuple[type[Detector], ...]] = (
    Clipping,
    Stepping,
    Scheduling,
    ScalerUse,
    Saving,
    Eps,
    LostUpdates,
    Averages,
    BatchNorm,
    HalfLoss,
    CachedCasts,
    Membership,
    Accumulation,
    Frozen,
    Masters,
    Outcome,
)

RULES: Final[dict[str, Rule]] = {
    rule.id: rule
    for rule in sorted((r for d in DETECTORS for r in d.RULES), key=lambda rule: rule.id)
}
"""By id, in the order of ids."""


def select_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules with these ids, or beginnings of ids such as ``PA1``; by default all."""
    for start in (*select, *ignore):
        if not any(key.startswith(start) for key in RULES) or not start:
            raise bad_value(
                f"There is no rule {start!r}",
                f"Rules are {', '.join(RULES)}; PA1 means all that begin so",
                "Call preamp doctor --list to see what they are",
            )
    wanted = tuple(
        rule
        for key, rule in RULES.items()
        if (not select or key.startswith(tuple(select))) and not key.startswith(tuple(ignore))
    )
    if not wanted:
        raise bad_value(
            "No rule is left to look for",
            "Some rule must be selected and not ignored",
            "Leave out --select or --ignore",
        )
    return wanted
