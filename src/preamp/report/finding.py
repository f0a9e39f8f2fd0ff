# SPDX-License-Identifier: BSD-3-Clause
"""What may be said of a run: all rules, findings with their evidence, and a verdict in brief.

A measurement stands in the file of the section that it looks at, and yields findings in words. What
each of them is worth, and which others it explains, is a row of `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from preamp.report import words


class Severity(IntEnum):
    """How much something matters."""

    NOTE = 1
    WARNING = 2
    CRITICAL = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is worth saying."""

    id: str  # stable name
    severity: Severity  # how much it matters, unless a finding is grave
    hides: tuple[str, ...] = ()  # rules whose findings are consequences of this one's


_SKIPS = ("many-skips", "skips-in-a-row", "no-step-taken", "overflow-in-one-place")
_LOST = ("overflow-taken", "loss-not-finite", "weights-not-finite")

RULES: Final = (
    Rule("diverges", Severity.WARNING, (*_LOST, "overflow-at-any-scale", *_SKIPS)),
    Rule("overflow-taken", Severity.CRITICAL, ("loss-not-finite", "weights-not-finite")),
    Rule("loss-not-finite", Severity.CRITICAL, ("weights-not-finite",)),
    Rule("weights-not-finite", Severity.CRITICAL),
    Rule("gradients-all-zero", Severity.CRITICAL),
    Rule("overflow-at-any-scale", Severity.CRITICAL, _SKIPS),
    Rule("no-step-taken", Severity.CRITICAL, ("overflow-in-one-place",)),
    Rule("overflow-in-one-place", Severity.WARNING),
    Rule("many-skips", Severity.WARNING),
    Rule("skips-in-a-row", Severity.WARNING),
    Rule("gradients-lost", Severity.WARNING),
    Rule("updates-stalled", Severity.WARNING),
    Rule("little-headroom", Severity.WARNING),
    Rule("loss-rises", Severity.NOTE),
)
"""All rules; of findings that matter as much, the first come first."""

_BY_ID: Final = {rule.id: rule for rule in RULES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that applies, in words, with what shows it."""

    id: str  # of the rule
    title: str  # what is wrong
    number: str  # the numbers that led to it
    do: str  # what can be done
    step: int = 0  # at which it began; 0 where that means nothing
    where: str = ""  # parameters, module, operation or loss; empty where that means nothing
    is_grave: bool = False  # critical here, although the rule is not so as such

    @property
    def rule(self) -> Rule:
        """Its rule."""
        return _BY_ID[self.id]

    @property
    def severity(self) -> Severity:
        """How much it matters."""
        return Severity.CRITICAL if self.is_grave else self.rule.severity

    @property
    def line(self) -> str:
        """What is wrong, and since when."""
        return f"{self.title}, since step {self.step:,}" if self.step else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know before reading on."""

    # ``"good"``, ``"note"``, ``"warning"``, ``"critical"``, or ``"empty"`` where too little is
    # recorded to say anything good.
    kind: str
    title: str  # what is wrong and since when, in a few words
    where: str  # a parameter, a module, an operation; may be empty
    text: str  # what else to know of the run, in a few sentences


def named(names: Sequence[str]) -> str:
    """Name the first of several, and how many more there are."""
    return words.shown(names[0]) + more(len(names) - 1, "")


def more(count: int, like: str = " like it") -> str:
    """Say how many more there are; nothing if there are none."""
    return f", and {count:,} more{like}" if count > 0 else ""
