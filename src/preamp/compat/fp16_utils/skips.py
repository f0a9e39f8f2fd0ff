# SPDX-License-Identifier: BSD-3-Clause
"""Steps not taken because of an overflow: how they are told, and when enough is enough."""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.amp_state import amp_state
from preamp.core.log import say
from preamp.engine.names import ParameterNames
from preamp.engine.overflow import GradientNote, find_cause
from preamp.engine.overflow_messages import check_limits, skip_message
from preamp.policy import OPT_LEVELS
from preamp.scaling import LossScaler

MAX_SKIPS = OPT_LEVELS["O2"].max_consecutive_skips or 50
"""Skipped steps in a row after which training cannot be going anywhere, as with amp."""


class Skips:
    """Counts steps, tells of those not taken, and gives up where scaling cannot go on."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._name_of = ParameterNames((), (optimizer,)).of
        self._steps = 0
        self.in_row = 0  # skipped steps since the last one taken
        self.note: GradientNote | None = None  # what the latest backward found

    def watch(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        """Note what the coming backward starts from. Does not synchronise."""
        finite = torch.isfinite(loss.detach()).all()
        if self.note is not None:
            finite = finite.logical_and(self.note.loss_finite.to(finite.device))
        self.note = GradientNote(loss_id=0, loss_finite=finite, scale=scaler.scale.clone())

    def taken(self) -> None:
        """Count a step."""
        self._steps += 1
        self.in_row = 0
        self.note = None

    def skipped(self, scaler: LossScaler) -> None:
        """Tell of a skipped step; ``LossScaleError`` where scaling cannot go on. Synchronises."""
        self._steps += 1
        self.in_row += 1
        note, self.note = self.note, None
        notes = [] if note is None else [note]
        cause = find_cause(notes, self._steps, [scaler.value()], self._name_of)
        if amp_state.verbosity > 0:
            say(skip_message(cause), every_rank=True)
        check_limits(cause, self.in_row, MAX_SKIPS, scaler.rule)
