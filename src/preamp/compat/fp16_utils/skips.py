# SPDX-License-Identifier: BSD-3-Clause
"""Steps not taken because of an overflow: how they are told, and when enough is enough."""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.amp_state import amp_state
from preamp.compat.fp16_utils.half_params import HalfParams
from preamp.compat.fp16_utils.modules import CONVERTED
from preamp.core.log import say
from preamp.engine.names import ParameterNames
from preamp.engine.order import released
from preamp.engine.overflow import GradientNote, find_cause
from preamp.engine.overflow_messages import check_limits, overflow_message
from preamp.policy import OPT_LEVELS
from preamp.scaling import LossScaler

MAX_SKIPS = OPT_LEVELS["O2"].max_consecutive_skips or 50
"""Skipped steps in a row after which training cannot be going anywhere, as with amp."""


class Skips:
    """Counts steps, tells of those not taken, and gives up where scaling cannot go on."""

    def __init__(self, optimizer: Any, params: HalfParams) -> None:
        self._optimizer = optimizer
        self._params = params
        self._steps = 0
        self.in_row = 0  # skipped steps since the last one taken
        self.note: GradientNote | None = None  # what the latest backward found

    def _name_of(self, param: torch.Tensor) -> str:
        """The name in a model that was converted here, else the place in the optimizer."""
        for model in CONVERTED:
            for name, own in model.named_parameters():
                if own is param:
                    return name
        pairs = zip(self._params.masters, self._params.halves, strict=True)
        updated = next((master for master, half in pairs if half is param), param)
        return ParameterNames((), (self._optimizer,)).of(updated)

    def watch(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        """Note what the coming backward starts from. Does not synchronise."""
        finite = torch.isfinite(loss.detach()).all()
        if self.note is not None:
            finite = finite.logical_and(self.note.loss_finite.to(finite.device))
        graphs = [] if self.note is None else self.note.graphs
        self.note = GradientNote(0, loss_finite=finite, scale=scaler.scale.clone(), graphs=graphs)

    def went(self, loss: torch.Tensor) -> None:
        """The backward of ``loss`` is over."""
        if self.note is not None:
            self.note.graphs = released([*self.note.graphs, loss.grad_fn])

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
            say(overflow_message(cause))
        check_limits(cause, self.in_row, MAX_SKIPS, scaler.rule)
