# SPDX-License-Identifier: BSD-3-Clause
"""One run in a few plain sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from preamp.report import words
from preamp.report.advice import Finding, Severity
from preamp.report.evidence import uses_half
from preamp.report.gather import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know before reading on.

    Attributes:
        kind: ``"good"``, ``"note"``, ``"warning"``, ``"critical"``, or ``"empty"`` where too
            little is recorded to say anything good.
        title: In a few words.
        text: In a few sentences.
    """

    kind: str
    title: str
    text: str


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
        return f"Something went wrong: {_decapitalised(findings[0].title)}"
    count = sum(finding.severity > Severity.NOTE for finding in findings)
    verb = "deserves" if count == 1 else "deserve"
    return f"{words.counted(count, 'thing')} {verb} attention"


def _decapitalised(text: str) -> str:
    return text[:1].lower() + text[1:]


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
