# SPDX-License-Identifier: BSD-3-Clause
"""What to say about a run: a rule for each thing that is worth saying, and a verdict in brief.

A rule has words, and a measurement from `evidence`, `course` or `collapse` that yields the numbers,
step and place for them whenever there is something to say. A new rule is a row of `RULES` and a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

from preamp.report import collapse, course, evidence, losses, settings, words
from preamp.report.evidence import Evidence
from preamp.report.gather import Run

Picture = Literal["loss", "scale", "tensor", "casts"]


class Severity(IntEnum):
    """How much something matters."""

    NOTE = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """The severity in a word."""
        return self.name.capitalize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that is worth saying."""

    id: str  # stable name
    severity: Severity  # how much it matters
    picture: Picture  # what shows it
    # Yields once for each finding; ``None`` where `collapse.explain` has them.
    measure: Callable[[Run], Iterable[Evidence]] | None = None
    title: str = "{title}"  # what is wrong, as a format string
    number: str = "{number}"  # the numbers that led to it, as a format string
    do: str = "{do}"  # what can be done, as a format string
    when: str = "since step {step}"  # as a format string
    hides: tuple[str, ...] = ()  # rules whose findings are consequences of this one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that applies, in words."""

    id: str  # of the rule
    severity: Severity  # how much it matters
    title: str  # what is wrong
    when: str  # since which step, or at which; empty where that means nothing
    where: str  # parameters, module, operation or loss; empty where that means nothing
    number: str  # the numbers that led to it
    do: str  # what can be done
    picture: Picture  # what shows it
    evidence: Evidence  # for the picture

    @property
    def line(self) -> str:
        """What is wrong, and since when."""
        return f"{self.title}, {self.when}" if self.when else self.title


_LOSSES = ("diverges", "loss-not-finite", "loss-jumps", "loss-rises", "loss-stays")
_SKIPS = ("many-skips", "skips-in-a-row", "no-step-taken", "overflow-in-one-place")

RULES: Final = (
    Rule(
        id="eps-is-zero",
        severity=Severity.WARNING,
        title="The eps of {class} {fate}",
        number="Its eps is {eps}, which float16 rounds to zero, so weights with a gradient of zero"
        " are divided by zero.{what}",
        do="Pass eps=1e-4 to {class}, or update float32 masters (O2), which keep small updates.",
        picture="loss",
        hides=("weights-not-finite",),
    ),
    Rule(
        id="decay-too-large",
        severity=Severity.WARNING,
        measure=settings.decay_too_large,
        title="The weight decay of {class} is too large",
        number="{decay} times a learning rate of {rate} {takes} at each step.{loss}",
        do="Lower it: {usual} or less takes a thousandth of a weight per step at this rate.",
        picture="loss",
        hides=("weights-rewritten", "weights-not-finite", *_LOSSES, *_SKIPS),
    ),
    Rule(
        id="momentum-is-one",
        severity=Severity.WARNING,
        measure=settings.momentum_is_one,
        title="The momentum of {class} is {momentum}",
        number="Every gradient stays in the sum that weights move by, and none is ever forgotten,"
        " so the loss swings or grows.{loss}",
        do="Pass 0.9 or 0.99; the learning rate may have to change with it.",
        picture="loss",
        hides=("loss-stays", "diverges", "loss-rises", "loss-jumps"),
    ),
    Rule(
        id="weights-rewritten",
        severity=Severity.WARNING,
        title="Weights change by more than updates can",
        number="{count} of {of} did between the looks at steps {last} and {look}; the size of"
        " {name} went from {old} to {new}.",
        do="Look at what writes to weights there: a layer that is made anew, a file that is loaded,"
        " an average that is copied back.",
        picture="loss",
        hides=("weights-not-finite", *_LOSSES, *_SKIPS),
    ),
    Rule(
        id="diverges",
        severity=Severity.WARNING,
        title="Training diverges",
        number="Loss {loss} went from {first} to {last}{end}.{rate}",
        do="{do} Then warm it up, or clip gradients.",
        picture="loss",
        hides=("weights-not-finite", "loss-jumps", *_SKIPS),
    ),
    Rule(
        id="loss-not-finite",
        severity=Severity.CRITICAL,
        picture="loss",
        hides=("weights-not-finite",),
    ),
    Rule(
        id="weights-not-finite",
        severity=Severity.CRITICAL,
        measure=evidence.weights_not_finite,
        title="Weights are infinite or nan",
        number="{values} at the latest look, the first in {name}.",
        do="No step can repair them. Go back to a checkpoint from before, and look at the data and "
        "the learning rate of the steps before this look.",
        picture="loss",
    ),
    Rule(
        id="gradients-all-zero",
        severity=Severity.CRITICAL,
        measure=evidence.gradients_all_zero,
        title="All gradients are zero{form}",
        number="{gradients} had no value other than zero in {looks}, the latest at step {last}, at"
        " a loss scale of {scale}.",
        picture="tensor",
        hides=("gradients-always-zero", "scale-at-ceiling", "loss-stays"),
    ),
    Rule(
        id="overflow-at-any-scale",
        severity=Severity.CRITICAL,
        title="Gradients become {kind} at any scale",
        number="In {count}, at {scales}.{input}",
        picture="scale",
        hides=_SKIPS,
    ),
    Rule(
        id="no-step-taken",
        severity=Severity.CRITICAL,
        measure=course.no_step_taken,
        title="No step was taken",
        number="{steps}{whose}, all of them skipped.{down}",
        do="The loss scale begins too high for so few steps: train for longer, or begin with a "
        "lower scale, by preamp.engine_of(optimizer).scaler(0).set_scale(...).",
        picture="scale",
        hides=("overflow-in-one-place",),
    ),
    Rule(
        id="loss-jumps",
        severity=Severity.WARNING,
        title="The loss jumps to {value}",
        hides=("weights-not-finite", *_SKIPS),
        number="That is {times} the largest of the steps before{back}{more}{end}.{rate}",
        picture="loss",
        when="at step {step}",
    ),
    Rule(
        id="overflow-in-one-place",
        severity=Severity.WARNING,
        measure=course.overflows_in_one_place,
        title="Overflows keep beginning in the {place}",
        number="It came first in {count} of {total}, at loss scales of {scales}.{input}",
        picture="scale",
    ),
    Rule(
        id="many-skips",
        severity=Severity.WARNING,
        measure=course.many_skips,
        title="Many steps were skipped",
        number="{skipped} of {steps}{whose}{since}: {share}. Keeping a scale takes about one in "
        "2,000.",
        do="Gradients vary more than the scale can follow. Clip them, lower the learning rate, or "
        "train in bfloat16 (O4, O5).{schedule}",
        picture="scale",
    ),
    Rule(
        id="skips-in-a-row",
        severity=Severity.WARNING,
        measure=course.skips_in_a_row,
        title="Many steps in a row were skipped",
        number="{row}{whose} in a row, up to step {end}.",
        do="{do}{schedule}",
        picture="scale",
    ),
    Rule(
        id="gradients-lost",
        severity=Severity.WARNING,
        measure=evidence.gradients_lost,
        title="Gradients vanish below the smallest {form} number",
        number="{share} of the values in {name} are lost at a loss scale of {scale}{more}.",
        do="{room}",
        picture="tensor",
        hides=("gradients-always-zero",),
    ),
    Rule(
        id="updates-stalled",
        severity=Severity.WARNING,
        measure=evidence.updates_stalled,
        title="Updates round to nothing",
        number="{share} of the half weights stayed as they were although they have a gradient; "
        "{worst} in {name}.",
        do="Keep float32 masters (O2, O5), or float32 weights (O1, O4).",
        picture="tensor",
    ),
    Rule(
        id="little-headroom",
        severity=Severity.WARNING,
        measure=evidence.little_headroom,
        title="Values come close to the largest {form} number",
        number="The {what} {name} reaches {max}, {headroom} powers of two below it{more}.",
        do="A little growth overflows. Scale or normalise the values, keep the module in float32, "
        "or use bfloat16 (O4, O5).",
        picture="tensor",
    ),
    Rule(
        id="loss-stays",
        severity=Severity.WARNING,
        measure=settings.loss_stays,
        title="The loss stays where it began",
        number="Loss {loss} lies between {low} and {high} in all of {steps}.{norm}",
        picture="loss",
    ),
    Rule(
        id="no-gradient-arrives",
        severity=Severity.WARNING,
        measure=evidence.no_gradient_arrives,
        title="No gradient reaches {name}",
        number="It had no value other than zero in {looks}{more}; the first after it that"
        " had one is {next}.",
        do="Look at what lies between: a relu or another function that is saturated, a detach, a"
        " norm over a single value.",
        picture="tensor",
        hides=("gradients-always-zero", "loss-stays"),
    ),
    Rule(
        id="loss-rises",
        severity=Severity.NOTE,
        measure=losses.losses_rise,
        title="A loss rises",
        number="Loss {loss} went from {first} to {last}; the gradient that grew most is {times}"
        " times what it was.",
        do="Where that is meant, as against a critic that learns or with harder data, all is well."
        " Otherwise lower the learning rate.",
        picture="loss",
    ),
    Rule(
        id="scale-at-ceiling",
        severity=Severity.NOTE,
        measure=course.scale_at_ceiling,
        title="The loss scale stays at its ceiling",
        number="Loss {loss} is at {scale} for {share} of the steps.",
        do="Gradients would bear a larger scale. That is harmless unless the heat map shows "
        "underflow; then raise max_loss_scale.",
        picture="scale",
    ),
    Rule(
        id="gradients-always-zero",
        severity=Severity.NOTE,
        measure=evidence.gradients_always_zero,
        title="A gradient is always zero",
        number="The gradient of {name} had no value other than zero in {looks}{more}.",
        do="Check that it is used, and that what comes before it is not saturated.",
        picture="tensor",
    ),
    Rule(
        id="casts-of-one-line",
        severity=Severity.NOTE,
        measure=evidence.casts_of_one_line,
        title="One line of source does most of the casting",
        number="At {where}, {bytes} are cast: {share} of all.",
        do="Cast its input once, outside a loop, or run the module at the precision of its input.",
        picture="casts",
        when="",
    ),
)
"""All rules; of findings that matter as much, the first come first."""


def advise(run: Run) -> list[Finding]:
    """Apply all rules; returns what was found, the gravest first, without mere consequences.

    Of critical findings the earliest comes first.
    """
    told = collapse.explain(run)
    seen_by = [(rule, rule.measure(run) if rule.measure else told[rule.id]) for rule in RULES]
    found = [(rule, seen) for rule, all_seen in seen_by for seen in all_seen]
    hidden = {
        name for rule, seen in found if _severity(rule, seen) > Severity.NOTE for name in rule.hides
    }
    findings = [_finding(rule, seen) for rule, seen in found if rule.id not in hidden]
    return sorted(findings, key=_rank)


def _severity(rule: Rule, seen: Evidence) -> Severity:
    return Severity.CRITICAL if seen.is_grave else rule.severity


def _rank(finding: Finding) -> tuple[int, int]:
    is_critical = finding.severity is Severity.CRITICAL
    return -finding.severity, finding.evidence.step if is_critical else 0


def _finding(rule: Rule, seen: Evidence) -> Finding:
    values = {"step": f"{seen.step:,}", **seen.values}
    return Finding(
        id=rule.id,
        severity=_severity(rule, seen),
        title=rule.title.format(**values),
        when=rule.when.format(**values) if seen.step else "",
        where=seen.where,
        number=rule.number.format(**values),
        do=rule.do.format(**values),
        picture=rule.picture,
        evidence=seen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know before reading on."""

    # ``"good"``, ``"note"``, ``"warning"``, ``"critical"``, or ``"empty"`` where too little is
    # recorded to say anything good.
    kind: str
    title: str  # what is wrong and since when, in a few words
    where: str  # a parameter, a module, an operation; may be empty
    text: str  # what else to know of the run, in a few sentences


def judge(run: Run, findings: Sequence[Finding]) -> Verdict:
    """Sum up a run. ``findings`` are what `advise` returned."""
    if not run.steps and not findings:
        return Verdict(
            kind="empty",
            title="No step is recorded",
            where="",
            text="There is nothing to judge: no call of optimizer.step was recorded.",
        )
    unseen = _unseen(run)
    serious = [finding for finding in findings if finding.severity > Severity.NOTE]
    facts = " ".join(filter(None, [_more(serious), _skips(run), _loss(run), *unseen.values()]))
    if serious:
        first = serious[0]
        kind = first.severity.word.lower()
        return Verdict(kind=kind, title=first.line, where=first.where, text=facts)
    notes = words.counted(len(findings), "note") if findings else ""
    kind, title = "good", "Nothing to report"
    if unseen:
        kind = "empty"
        title = f"{notes or 'Nothing found'}, but {' and '.join(unseen)} were not recorded"
    elif notes:
        kind, title = "note", f"Nothing to worry about, {notes}"
    return Verdict(kind=kind, title=title, where="", text=facts)


def _more(serious: Sequence[Finding]) -> str:
    count = len(serious) - 1
    verb = "deserves" if count == 1 else "deserve"
    return f"{words.counted(count, 'more thing')} {verb} attention." if count > 0 else ""


def _skips(run: Run) -> str:
    if not run.steps:
        return ""
    skipped, steps = len(run.skipped), words.counted(len(run.steps), "step")
    count = sum(1 for _ in run.by_optimizer())
    steps += f" of {count} optimizers" if count > 1 else ""
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
    finite = losses.finite_of(points)
    if len(finite) < 2:
        return ""
    (_, start), (last, end) = finite[0], finite[-1]
    text = f"The loss went from {words.magnitude(start)} to {words.magnitude(end)}"
    lost = [step for step, _ in points if step > last]
    return f"{text}, and is not finite from step {lost[0]:,} on." if lost else f"{text}."


def _unseen(run: Run) -> dict[str, str]:
    """What nothing can be said about, and why that matters; nothing half is lost in float32."""
    found: dict[str, str] = {}
    if not run.first_losses:
        found["losses"] = "No loss was recorded, so whether it fell is not judged."
    if not run.numerics and run.half:
        found["tensors"] = (
            "The tensors themselves were not looked at, so under- and overflow in them is not "
            'judged; numerics="light" looks at them.'
        )
    return found
