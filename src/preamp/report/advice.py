# SPDX-License-Identifier: BSD-3-Clause
"""What to say about a run: a rule for each thing that is worth saying, and a verdict in brief.

A rule has words, and a measurement from `evidence` that yields the numbers for them whenever there
is something to say. A new rule is a row of `RULES` and a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from preamp.report import evidence, words
from preamp.report.evidence import uses_half
from preamp.report.gather import Run


class Severity(IntEnum):
    """How much something matters."""

    NOTE = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """The severity in a word."""
        return {1: "Note", 2: "Warning", 3: "Critical"}[int(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that is worth saying."""

    id: str  # stable name
    severity: Severity  # how much it matters
    measure: Callable[[Run], Iterable[evidence.Values]]  # yields the numbers, once for each finding
    title: str  # what was found, as a format string
    number: str  # the numbers that led to it, as a format string
    do: str  # what can be done, as a format string


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that applies, in words."""

    id: str  # of the rule
    severity: Severity  # how much it matters
    title: str  # what was found
    number: str  # the numbers that led to it
    do: str  # what can be done


RULES: Final = (
    Rule(
        id="weights-not-finite",
        severity=Severity.CRITICAL,
        measure=evidence.weights_not_finite,
        title="Weights are infinite or nan",
        number="{values} at the latest look, the first in {name}.",
        do="No step can repair them. Go back to a checkpoint from before, and look at the step and "
        "the learning rate at which it happened.",
    ),
    Rule(
        id="loss-not-finite",
        severity=Severity.CRITICAL,
        measure=evidence.losses_not_finite,
        title="The loss itself was infinite or nan",
        number="In {steps}, for the first time at step {first}.",
        do="No loss scale can help, because the forward had failed already. Run with "
        'loss_scale="dynamic", overflow="trace" to learn which module was the first.',
    ),
    Rule(
        id="no-step-taken",
        severity=Severity.CRITICAL,
        measure=evidence.no_step_taken,
        title="No step was taken",
        number="{steps}{whose}, all of them skipped.",
        do="The weights are as they were at the start. While a loss scale that begins too high "
        "comes down, that takes a few more steps, or a lower scale to begin with; after that, the "
        "skipped steps below tell where the overflows begin.",
    ),
    Rule(
        id="scale-at-floor",
        severity=Severity.CRITICAL,
        measure=evidence.scale_at_floor,
        title="The loss scale has come down to its floor",
        number="Loss {loss} ends at a scale of {scale}.",
        do="Gradients overflow whatever the scale is. Lower the learning rate or clip, run the "
        "layer that overflows first in float32, or train in bfloat16 (O4, O5).",
    ),
    Rule(
        id="loss-risen",
        severity=Severity.WARNING,
        measure=evidence.losses_risen,
        title="The loss ends far above where it began",
        number="Loss {loss} went from {first} to {last}.",
        do="Unless it is meant to rise, the training has diverged: lower the learning rate, warm "
        "it up, or clip, and compare with a run in float32 (O0).",
    ),
    Rule(
        id="overflow-in-one-place",
        severity=Severity.WARNING,
        measure=evidence.overflows_in_one_place,
        title="Overflows keep beginning in {name}",
        number="It came first in {count} of {total}.",
        do="Keep that module in float32, or look at what it computes: large logits, a division by "
        "a small number, or an exponential.",
    ),
    Rule(
        id="many-skips",
        severity=Severity.WARNING,
        measure=evidence.many_skips,
        title="Many steps were skipped",
        number="{skipped} of {steps}{whose}{since}: {share}. Keeping a scale takes about one in "
        "2,000.",
        do="Gradients vary more than the scale can follow. Clip them, lower the learning rate, or "
        "train in bfloat16 (O4, O5).{schedule}",
    ),
    Rule(
        id="skips-in-a-row",
        severity=Severity.WARNING,
        measure=evidence.skips_in_a_row,
        title="Many steps in a row were skipped",
        number="{row}{whose} in a row, up to step {end}.",
        do="At the start of a run this is a loss scale that begins too high: begin with a lower "
        "one, by preamp.engine_of(optimizer).scaler(0).set_scale(...). "
        "Later it is a training that is about to diverge.{schedule}",
    ),
    Rule(
        id="gradients-lost",
        severity=Severity.WARNING,
        measure=evidence.gradients_lost,
        title="Gradients vanish below the smallest {form} number",
        number="{share} of the values that are not zero in {name} are lost at a loss scale of "
        "{scale}{more}.",
        do="{room}",
    ),
    Rule(
        id="updates-stalled",
        severity=Severity.WARNING,
        measure=evidence.updates_stalled,
        title="Updates round to nothing",
        number="{share} of the half weights stayed as they were although they have a gradient; "
        "{worst} in {name}.",
        do="Keep float32 masters (O2, O5), or float32 weights (O1, O4).",
    ),
    Rule(
        id="little-headroom",
        severity=Severity.WARNING,
        measure=evidence.little_headroom,
        title="Values come close to the largest {form} number",
        number="The {what} {name} reaches {max}, {headroom} powers of two below it{more}.",
        do="A little growth overflows. Scale or normalise the values, keep the module in float32, "
        "or use bfloat16 (O4, O5).",
    ),
    Rule(
        id="long-search",
        severity=Severity.NOTE,
        measure=evidence.long_search,
        title="Finding a loss scale took most of the run",
        number="The first {skipped} of {steps}{whose} were skipped.",
        do="Let it train for longer before it is judged, or begin with a lower scale, by "
        "preamp.engine_of(optimizer).scaler(0).set_scale(...).",
    ),
    Rule(
        id="scale-at-ceiling",
        severity=Severity.NOTE,
        measure=evidence.scale_at_ceiling,
        title="The loss scale stays at its ceiling",
        number="Loss {loss} is at {scale} for {share} of the steps.",
        do="Gradients would bear a larger scale. That is harmless unless the heat map shows "
        "underflow; then raise max_loss_scale.",
    ),
    Rule(
        id="gradients-always-zero",
        severity=Severity.NOTE,
        measure=evidence.gradients_always_zero,
        title="A gradient is always zero",
        number="{name} had no value other than zero in {looks}{more}.",
        do="Check that it is used, and that what comes before it is not saturated.",
    ),
    Rule(
        id="casts-of-one-line",
        severity=Severity.NOTE,
        measure=evidence.casts_of_one_line,
        title="One line of source does most of the casting",
        number="{where} has {bytes} cast: {share} of all.",
        do="Cast its input once, outside a loop, or run the module at the precision of its input.",
    ),
)
"""All rules, the gravest first."""


def advise(run: Run) -> list[Finding]:
    """Apply all rules; returns what was found, the gravest first."""
    return [
        Finding(
            id=rule.id,
            severity=rule.severity,
            title=rule.title.format(**values),
            number=rule.number.format(**values),
            do=rule.do.format(**values),
        )
        for rule in RULES
        for values in rule.measure(run)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know before reading on."""

    # ``"good"``, ``"note"``, ``"warning"``, ``"critical"``, or ``"empty"`` where too little is
    # recorded to say anything good.
    kind: str
    title: str  # in a few words
    text: str  # in a few sentences


def judge(run: Run, findings: Sequence[Finding]) -> Verdict:
    """Sum up a run."""
    if not run.steps:
        return Verdict(
            kind="empty",
            title="No step is recorded",
            text="There is nothing to judge: no call of optimizer.step was recorded.",
        )
    unseen = _unseen(run)
    text = " ".join(filter(None, [_skips(run), _loss(run), *unseen.values()]))
    worst = max((finding.severity for finding in findings), default=None)
    if worst is not None and worst > Severity.NOTE:
        return Verdict(kind=worst.word.lower(), title=_trouble(findings, worst), text=text)
    notes = words.counted(len(findings), "note") if findings else ""
    if unseen:
        title = f"{notes or 'Nothing found'}, but {' and '.join(unseen)} were not recorded"
        return Verdict(kind="empty", title=title, text=text)
    if notes:
        return Verdict(kind="note", title=f"Nothing to worry about, {notes}", text=text)
    return Verdict(kind="good", title="Nothing to report", text=text)


def _trouble(findings: Sequence[Finding], worst: Severity) -> str:
    if worst is Severity.CRITICAL:
        title = findings[0].title
        return f"Something went wrong: {title[:1].lower()}{title[1:]}"
    count = sum(finding.severity > Severity.NOTE for finding in findings)
    verb = "deserves" if count == 1 else "deserve"
    return f"{words.counted(count, 'thing')} {verb} attention"


def _skips(run: Run) -> str:
    skipped, steps = len(run.skipped), words.counted(len(run.steps), "step")
    if not skipped:
        return f"{steps}, none of them skipped."
    verb = "was" if skipped == 1 else "were"
    text = (
        f"{steps}, of which {skipped:,} {verb} skipped ({words.share(skipped / len(run.steps))})."
    )
    begun = next((i for i, step in enumerate(run.steps) if not step.skipped), len(run.steps))
    if run.is_dynamic and 1 < begun == skipped < len(run.steps):
        text += " All of them came first, while the loss scale was being found."
    elif run.is_dynamic and skipped <= min(max(2, len(run.steps) // 100), len(run.steps) // 4):
        text += " A few skips are how dynamic loss scaling finds its scale."
    return text


def _loss(run: Run) -> str:
    points = run.first_losses
    finite = [loss for _, loss in points if math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    start, end = words.magnitude(finite[0]), words.magnitude(finite[-1])
    text = f"The loss went from {start} to {end}"
    after = len(points) - 1 - max(i for i, (_, loss) in enumerate(points) if math.isfinite(loss))
    if not after:
        return f"{text}."
    return f"{text}, and is not finite from step {points[-after][0]:,} on."


def _unseen(run: Run) -> dict[str, str]:
    """What nothing can be said about, and why that matters; nothing half is lost in float32."""
    found: dict[str, str] = {}
    if not run.first_losses:
        found["losses"] = "No loss was recorded, so whether it fell is not judged."
    if not run.numerics and uses_half(run):
        found["tensors"] = (
            "The tensors themselves were not looked at, so under- and overflow in them is not "
            'judged; numerics="light" looks at them.'
        )
    return found
