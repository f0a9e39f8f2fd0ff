# SPDX-License-Identifier: BSD-3-Clause
"""One run in a few plain sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from preamp.report import words
from preamp.report.advice import Finding, Severity
from preamp.report.gather import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know before reading on.

    Attributes:
        kind: ``"good"``, ``"note"``, ``"warning"``, ``"critical"`` or ``"empty"``.
        title: In a few words.
        text: In a few sentences.
    """

    kind: str
    title: str
    text: str


def judge(run: Run, findings: Sequence[Finding]) -> Verdict:
    """Sum up a run.

    Args:
        run: What is known of it.
        findings: What the rules found.
    """
    if not run.steps:
        return Verdict(
            kind="empty",
            title="No step is recorded",
            text="There is nothing to judge: no call of optimizer.step was recorded.",
        )
    text = " ".join([_skips(run), _loss(run), _unseen(run)]).strip()
    worst = max((finding.severity for finding in findings), default=None)
    if worst is None:
        return Verdict(kind="good", title="Nothing to report", text=text)
    count = sum(finding.severity > Severity.NOTE for finding in findings)
    if not count:
        title = f"Nothing to worry about, {words.counted(len(findings), 'note')}"
    elif worst is Severity.CRITICAL:
        title = f"Something went wrong: {_decapitalised(findings[0].title)}"
    else:
        verb = "deserves" if count == 1 else "deserve"
        title = f"{words.counted(count, 'thing')} {verb} attention"
    return Verdict(kind=worst.word.lower(), title=title, text=text)


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
    elif run.is_dynamic and skipped <= max(2, len(run.steps) // 100):
        text += " A few skips are how dynamic loss scaling finds its scale."
    return text


def _loss(run: Run) -> str:
    points = run.first_losses
    finite = [loss for _, loss in points if math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    start, end = words.magnitude(finite[0]), words.magnitude(finite[-1])
    return f"The loss went from {start} to {end}."


def _unseen(run: Run) -> str:
    if run.numerics:
        return ""
    return (
        "The tensors themselves were not looked at, so under- and overflow in them is not judged."
    )
