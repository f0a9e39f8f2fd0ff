# SPDX-License-Identifier: BSD-3-Clause
"""The picture beside each piece of advice: what shows that it is so."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.report import exponents, timeline, words
from preamp.report.advice import Finding
from preamp.report.blocks import Advised, Figure
from preamp.report.gather import Run
from preamp.report.svg import joined

_BEGAN = "Marked is where it began."


def beside(run: Run, findings: Sequence[Finding], prefix: str) -> list[Advised]:
    """Put findings beside their pictures. Each picture is drawn once; others refer to it."""
    items: list[Advised] = []
    for index, finding in enumerate(findings):
        drawn = next((f for f in findings[:index] if f.picture == finding.picture), None)
        figure = see = None
        if finding.picture == "tensor":
            figure = _of_tensor(finding, f"{prefix}shown-{index}")
        elif finding.picture == "casts":
            see = (f"{prefix}casts", "the cast audit")
        elif drawn is None:
            steps = [f.evidence.step for f in findings if f.picture == finding.picture]
            figure = _of_steps(run, finding, steps, f"{prefix}shown-{finding.picture}")
            see = None if figure else (f"{prefix}skips", "the skipped steps")
        elif _of_steps(run, finding, (), "") is not None:
            see = (f"{prefix}shown-{finding.picture}-title", f"the {finding.picture} above")
        items.append(Advised(finding=finding, figure=figure, see=see))
    return items


def _of_steps(run: Run, finding: Finding, began: Sequence[int], name: str) -> Figure | None:
    """Draw losses or loss scales; ``None`` where there are none to be drawn."""
    is_loss = finding.picture == "loss"
    draw = timeline.loss_chart if is_loss else timeline.scale_chart
    body = draw(run, name, sorted({*began}))
    title = "Loss by step" if is_loss else "Loss scale by step"
    return None if body is None else Figure(title=title, body=body, caption=_BEGAN)


def _of_tensor(finding: Finding, name: str) -> Figure | None:
    """Draw a tensor's exponents where they were recorded, else the number by step."""
    tensor, curve = finding.evidence.tensor, finding.evidence.curve
    if curve is None:
        return None
    if tensor is not None and tensor.histogram:
        step = int(curve.points[-1][0])
        chosen = exponents.Chosen(tensor=tensor, step=step, reason="the latest look")
        legend = exponents.legend(with_outline=tensor.scale != 1)
        return Figure(
            title=f"Exponents of {words.shown(tensor.name, 48)}",
            body=joined([exponents.draw(chosen, name), legend]),
            caption=exponents.caption(chosen),
        )
    body = timeline.curve_chart(curve, name, finding.evidence.step)
    return (
        None if body is None else Figure(title=f"{curve.name}, by step", body=body, caption=_BEGAN)
    )
