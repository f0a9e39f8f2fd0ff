# SPDX-License-Identifier: BSD-3-Clause
"""Counting the bytes of one training step, and those of casts by line."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch

from preamp.core.undo import UndoStack
from preamp.doctor.detector import CastCount
from preamp.doctor.places import current_place
from preamp.doctor.probes.watch import Watch
from preamp.doctor.rule import Place
from preamp.doctor.rules.speed import kind_of_cast
from preamp.kernels.observe import ObservedOps

_CASTS: Final = ("aten._to_copy.default", "aten.copy_.default")


class CastProbes:
    """Looks at all operations between the first and the second optimizer step."""

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        """Install the probe; ``undo`` takes it off."""
        self._watch = watch
        self._mode: ObservedOps | None = None
        self._thread = 0
        self._is_counting = False
        self._is_over = False
        self._moved = 0
        self._casts: Counter[tuple[Place | None, str]] = Counter()
        undo.push(self._stop)

    def step_taken(self) -> None:
        """Start after the first step, and stop after the second."""
        steps = self._watch.seen.steps
        if steps == 1 and not self._is_over:
            self._thread = threading.get_ident()
            self._mode = ObservedOps(self._count)
            self._is_counting = True
            self._mode.start()
        elif steps == 2 and self._is_counting:
            self._stop()
            self._watch.tell("casts_counted", CastCount(self._moved, self._casts))
        elif self._mode is not None:
            self._stop()

    def _stop(self) -> None:
        """Stop; where another mode is in the way, only listening stops, and the mode later."""
        self._is_counting = False
        if self._mode is not None and threading.get_ident() == self._thread and self._mode.stop():
            self._mode = None

    def leave_alone(self) -> None:
        """Count nothing any more."""
        self._is_over = True
        self._stop()

    def _count(
        self, func: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        if not self._is_counting or self._watch.is_looking or getattr(func, "is_view", False):
            return
        if not written:
            return
        size = sum(tensor.nbytes for tensor in (*read, *written))
        self._moved += size
        source, target = _cast_of(func, read, written[0])
        if source is not target:
            self._casts[current_place(), kind_of_cast(source, target)] += size


def _cast_of(
    func: Any, read: Sequence[torch.Tensor], result: torch.Tensor
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes before and after; the same where the operation is no cast of floats."""
    if str(func) in _CASTS and read:
        source = read[-1] if str(func) == _CASTS[1] else read[0]
        if source.is_floating_point() and result.is_floating_point():
            return source.dtype, result.dtype
    return result.dtype, result.dtype
