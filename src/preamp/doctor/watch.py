# SPDX-License-Identifier: BSD-3-Clause
"""What probes tell of a run, and the detectors that are told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from preamp.core.torch_private.observe import fakes_tensors
from preamp.doctor.catalogue import DETECTORS
from preamp.doctor.detector import Findings
from preamp.doctor.rule import Rule
from preamp.doctor.seen import Seen

T = TypeVar("T")


class EnoughSteps(BaseException):
    """Ends a script after the steps that were asked for; not an error, so no ``Exception``."""


class Watch:
    """One run under the doctor's eyes; what has been ``seen`` so far is in there."""

    def __init__(self, rules: Sequence[Rule], *, steps: int | None = None) -> None:
        """Watch nothing yet; after ``steps`` optimizer steps `EnoughSteps` will be raised."""
        self.seen = Seen()
        self.notes: list[str] = []  # what could not be looked at, in sentences
        self.after_step: list[Callable[[], None]] = []  # called once detectors know of a step
        self._findings = Findings(rules)
        self._steps = steps
        self._detectors = [
            kind(self.seen, self._findings) for kind in DETECTORS if {*rules} & {*kind.RULES}
        ]
        self._lock = threading.RLock()
        self._process: int | None = None  # the examined one
        self._looking = 0

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

    def tell(self, event: str, *values: Any) -> None:
        """Tell the detectors of an event; one that fails is noted, and told of nothing again."""
        with self._look():
            for detector in tuple(self._detectors):
                try:
                    getattr(detector, event)(*values)
                except Exception as error:  # whatever a rule gets wrong must not end the user's run
                    self._detectors.remove(detector)
                    self._note_failure(", ".join(rule.id for rule in detector.RULES), error)

    @property
    def is_looking(self) -> bool:
        """Whether the doctor itself is computing, and not the script."""
        return self._looking > 0

    def attempt(self, look: Callable[..., T], *values: Any) -> T | None:
        """Return ``look(*values)``; ``None`` with a note if that failed."""
        with self._look():
            try:
                return look(*values)
            except Exception as error:  # as above
                self._note_failure("A probe", error)
                return None

    @contextmanager
    def _look(self) -> Generator[None]:
        with self._lock:
            self._looking += 1
            try:
                yield
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
        if note not in self.notes:
            self.notes.append(note)

    def step_taken(self) -> None:
        """Count an optimizer step; raises `EnoughSteps` at the last one wanted, and after it."""
        self.seen.steps += 1
        self.tell("step_over")
        for act in self.after_step:
            act()
        if self._steps is not None and self.seen.steps >= self._steps:
            raise EnoughSteps
