# SPDX-License-Identifier: BSD-3-Clause
"""Watching a run: probes on, detectors told, probes off."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from preamp.core.undo import UndoStack
from preamp.doctor.probes.modules import ModuleProbes
from preamp.doctor.probes.training import ScalerProbes, TrainingProbes
from preamp.doctor.rule import Finding
from preamp.doctor.watch import EnoughSteps, Watch


class Examination(Watch):
    """One run under the doctor's eyes, and what was found in it."""

    @contextmanager
    def watching(self) -> Generator[None]:
        """Keep the probes on in the body; what ends it, but for `EnoughSteps`, goes on.

        Mutates methods and functions of torch, all put back at the end. Models, optimizers,
        gradients and random numbers stay as they are.
        """
        undo = UndoStack()
        self._process = os.getpid()
        try:
            TrainingProbes(self, undo)
            ScalerProbes(self, undo)
            ModuleProbes(self, undo)
            yield
        except EnoughSteps:
            if not self.is_active:
                raise
        finally:
            if self.is_active:
                self.tell("run_ended")
            self._process = None
            undo.unwind()

    @property
    def findings(self) -> list[Finding]:
        """What was found, the worst first, then by rule."""
        return sorted(self._findings.found, key=lambda f: (-f.severity.rank, f.rule.id))
