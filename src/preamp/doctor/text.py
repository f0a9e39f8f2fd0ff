# SPDX-License-Identifier: BSD-3-Clause
"""What was found in a run, and what is known of rules, as text and JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from preamp.core.pytree import plain
from preamp.doctor.examination import Examination
from preamp.doctor.rule import Finding, Rule, Severity

_WIDEST = 96  # columns of a paragraph on a wide terminal
_VERSION = 1


def report_text(examination: Examination) -> str:
    """The report of a run, ending in a line break."""
    seen, findings = examination.seen, examination.findings
    steps = f"{seen.steps} optimizer step{'' if seen.steps == 1 else 's'}"
    skipped = f", {seen.skipped} of them skipped" if seen.skipped else ""
    lines = [f"preamp doctor: {_count(findings)} in {steps}{skipped}"]
    if not seen.steps:
        lines.append("  The script took no optimizer step, so most rules had nothing to look at.")
    for finding in findings:
        lines += ["", *_finding_lines(finding)]
    if findings:
        lines += ["", f"More about a rule: preamp doctor --explain {findings[0].rule.id}"]
    for note in examination.notes:
        lines += _paragraph(f"Note: {note}")
    return "\n".join(lines) + "\n"


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no findings"
    kinds = [finding.severity for finding in findings]
    counts = {kind: kinds.count(kind) for kind in (Severity.ERROR, Severity.WARNING, Severity.INFO)}
    return ", ".join(
        f"{count} {kind.value}{'s' if count > 1 and kind is not Severity.INFO else ''}"
        for kind, count in counts.items()
        if count
    )


def _finding_lines(finding: Finding) -> list[str]:
    where = f"{finding.where}: " if finding.where is not None else ""
    return [
        f"{where}{finding.rule.id} {finding.severity.value}: {finding.rule.title}",
        *_paragraph(finding.what, indent="  "),
        *_paragraph(f"Do: {finding.advice}", indent="  "),
    ]


def _paragraph(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        min(_WIDEST, shutil.get_terminal_size().columns),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def report_json(examination: Examination) -> dict[str, Any]:
    """The report of a run as plain data that JSON has words for."""
    return plain(
        {
            "version": _VERSION,
            "steps": examination.seen.steps,
            "skipped": examination.seen.skipped,
            "findings": [finding.to_json() for finding in examination.findings],
            "notes": examination.notes,
        }
    )


def list_text(rules: Sequence[Rule]) -> str:
    """One line for each rule."""
    return "".join(f"{rule.id}  {rule.severity.value:<7}  {rule.title}\n" for rule in rules)


def explain_text(rule: Rule) -> str:
    """All that is known about a rule."""
    parts = (("Why", rule.why), ("How it is seen", rule.how), ("What to do", rule.do))
    lines = [f"{rule.id} ({rule.severity.value}): {rule.title}"]
    for heading, text in parts:
        lines += ["", heading, *_paragraph(text, indent="  ")]
    return "\n".join(lines) + "\n"
