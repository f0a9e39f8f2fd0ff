# SPDX-License-Identifier: BSD-3-Clause
"""Watching a run: probes on, detectors told, probes off; what was found, as text and JSON."""

from __future__ import annotations

import os
import shutil
import textwrap
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from preamp.core.pytree import plain
from preamp.core.undo import UndoStack
from preamp.doctor.catalogue import DETECTORS
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.probes.modules import CastProbes, CompileProbe, ModuleProbes
from preamp.doctor.probes.training import ScalerProbes, TrainingProbes
from preamp.doctor.rule import Finding, Rule, Severity
from preamp.doctor.seen import Seen
from preamp.kernels.observe import fakes_tensors

T = TypeVar("T")


class EnoughSteps(BaseException):
    """Ends a script after the steps that were asked for; not an error, so no ``Exception``."""


class Examination:
    """One run under the doctor's eyes; what has been ``seen`` so far is in there."""

    def __init__(self, rules: Sequence[Rule], *, steps: int | None = None) -> None:
        """Install nothing yet; after ``steps`` optimizer steps `EnoughSteps` will be raised."""
        self.seen = Seen()
        self._findings = Findings(rules)
        self._steps = steps
        wanted = {rule.id for rule in rules}
        self._detectors = [
            kind(self.seen, self._findings)
            for kind in DETECTORS
            if wanted & {rule.id for rule in kind.RULES}
        ]
        for detector in self._detectors:
            detector.attempt = self.attempt
        self._undo = UndoStack()
        self._lock = threading.RLock()
        self._process: int | None = None
        self._failed: set[int] = set()
        self._looking = 0
        self._casts: CastProbes | None = None

    @property
    def is_active(self) -> bool:
        """Whether the calling process is the examined one, no fork of it, and computes for itself.

        What is captured into a CUDA graph may not be looked at: the host must not wait there. What
        ``torch.jit.trace`` records would have the doctor's own operations in it, and what is
        computed with fake tensors has no values.
        """
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        is_recorded = captures or cast("Any", torch.jit).is_tracing()
        return self._process == os.getpid() and not is_recorded and not fakes_tensors()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Keep the probes on in the body; what ends it, but for `EnoughSteps`, goes on.

        Mutates methods and functions of torch, all put back at the end. Models, optimizers,
        gradients and random numbers stay as they are.
        """
        self._process = os.getpid()
        try:
            TrainingProbes(self, self._undo)
            ScalerProbes(self, self._undo)
            modules = ModuleProbes(self, self._undo)
            self._casts = CastProbes(self, self._undo)
            CompileProbe(self, self._undo, modules, self._casts)
            yield
        except EnoughSteps:
            if not self.is_active:
                raise
        finally:
            if self.is_active:
                self.tell("run_ended")
            self._process = None
            self._undo.unwind()

    def tell(self, event: str, *values: Any) -> None:
        """Tell the detectors of an event; one that fails is noted, and told of nothing again."""
        with self._lock:
            self._looking += 1
            try:
                for detector in self._detectors:
                    if id(detector) not in self._failed:
                        self._tell_one(detector, event, values)
            finally:
                self._looking -= 1

    def _tell_one(self, detector: Detector, event: str, values: tuple[Any, ...]) -> None:
        try:
            getattr(detector, event)(*values)
        except Exception as error:  # whatever a rule gets wrong must not end the user's run
            self._failed.add(id(detector))
            self._note_failure(", ".join(rule.id for rule in detector.RULES), error)

    @property
    def is_looking(self) -> bool:
        """Whether the doctor itself is computing, and not the script."""
        return self._looking > 0

    def attempt(self, look: Callable[..., T], *values: Any) -> T | None:
        """Return ``look(*values)``; ``None`` with a note if that failed."""
        with self._lock:
            self._looking += 1
            try:
                return look(*values)
            except Exception as error:  # as above
                self._note_failure("A probe", error)
                return None
            finally:
                self._looking -= 1

    @contextmanager
    def noting_errors(self) -> Generator[None]:
        """Tell of errors of the script's that the body raises."""
        try:
            yield
        except Exception:  # which an interrupt and `EnoughSteps` are not
            self.tell("script_failed")
            raise

    def _note_failure(self, who: str, error: Exception) -> None:
        note = (
            f"{who}: the doctor itself failed ({type(error).__name__}: {error}) and missed "
            "something. The run was not affected; please report this."
        )
        if note not in self.seen.notes:
            self.seen.notes.append(note)

    def step_taken(self) -> None:
        """Count an optimizer step; raises `EnoughSteps` at the last one wanted, and after it."""
        self.seen.steps += 1
        self.tell("step_over")
        if self._casts is not None:
            self._casts.step_taken()
        if self._steps is not None and self.seen.steps >= self._steps:
            raise EnoughSteps

    @property
    def findings(self) -> list[Finding]:
        """What was found, the worst first, then by rule."""
        return sorted(self._findings.found, key=lambda f: (-f.severity.rank, f.rule.id))

    @property
    def notes(self) -> list[str]:
        """What could not be looked at, in sentences."""
        return list(self.seen.notes)


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
    words = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info"}
    return ", ".join(
        f"{kinds.count(kind)} {word}{'s' if kinds.count(kind) > 1 and word != 'info' else ''}"
        for kind, word in words.items()
        if kind in kinds
    )


def _finding_lines(finding: Finding) -> list[str]:
    where = f"{finding.where}: " if finding.where is not None else ""
    return [
        f"{where}{finding.rule.id} {finding.severity.value}: {finding.rule.title}",
        *_paragraph(finding.what, indent="  "),
        *_paragraph(f"Do: {finding.rule.do}", indent="  "),
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
