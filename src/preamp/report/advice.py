# SPDX-License-Identifier: BSD-3-Clause
"""What to say about a run: the findings of all sections in their order, and a verdict in brief."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from preamp.report import layers, losses, skips, tensors, words
from preamp.report.finding import RULES, Finding, Severity, Verdict
from preamp.report.gather import Run

_MEASUREMENTS: Final[tuple[Callable[[Run], Iterator[Finding]], ...]] = (
    losses.diverges,
    losses.overflows_taken,
    losses.loss_not_finite,
    skips.overflows_at_any_scale,
    skips.no_step_taken,
    skips.overflows_in_one_place,
    skips.many_skips,
    skips.skips_in_a_row,
    tensors.weights_not_finite,
    tensors.gradients_all_zero,
    tensors.gradients_lost,
    tensors.little_headroom,
    layers.updates_stalled,
)


def advise(run: Run) -> list[Finding]:
    """Return what was found, the gravest first, without mere consequences.

    Of critical findings the earliest comes first, of others the first by rule.
    """
    found = [finding for measure in _MEASUREMENTS for finding in measure(run)]
    serious = [finding for finding in found if finding.severity > Severity.NOTE]
    hidden = {id for finding in serious for id in finding.rule.hides}
    return sorted((finding for finding in found if finding.id not in hidden), key=_rank)


def _rank(finding: Finding) -> tuple[int, int, int]:
    is_critical = finding.severity is Severity.CRITICAL
    return (-finding.severity, finding.step if is_critical else 0, RULES.index(finding.rule))


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
        kind = first.severity.name.lower()
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
