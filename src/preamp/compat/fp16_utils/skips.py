# SPDX-License-Identifier: BSD-3-Clause
"""Steps not taken because of an overflow: how they are told, and when enough is enough."""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.amp_state import amp_state
from preamp.compat.fp16_utils.half_params import HalfParams
from preamp.compat.fp16_utils.modules import CONVERTED
from preamp.core.splits import Splits
from preamp.engine.core import ParameterNames
from preamp.engine.ledger import Ledger
from preamp.engine.order import released
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import Reductions
from preamp.engine.session import OptimizerSession
from preamp.kernels import backend
from preamp.optim import WeightTable
from preamp.policy import OPT_LEVELS
from preamp.policy.storage import FULL
from preamp.scaling import LossScaler

MAX_SKIPS = OPT_LEVELS["O2"].max_consecutive_skips or 50
"""Skipped steps in a row after which training cannot be going anywhere, as with amp."""


class Skips:
    """Counts steps, and has an engine's ledger tell of those not taken."""

    def __init__(self, optimizer: Any, params: HalfParams) -> None:
        self._params = params
        # Of an optimizer without an engine: no masters, no ranks
        table = WeightTable(optimizer, backend(), FULL)
        self._session = OptimizerSession(optimizer, backend(), table, Reductions((), Splits()))
        self.note: GradientNote | None = None  # what the latest backward found

    def _name_of(self, param: torch.Tensor) -> str:
        """The name in a model that was converted here, else the place in the optimizer."""
        for model in CONVERTED:
            for name, own in model.named_parameters():
                if own is param:
                    return name
        pairs = zip(self._params.masters, self._params.halves, strict=True)
        updated = next((master for master, half in pairs if half is param), param)
        return ParameterNames((), (self._session.optimizer,)).of(updated)

    def watch(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        """Note what the coming backward starts from. Does not synchronise."""
        finite = torch.isfinite(loss.detach()).all()
        note = GradientNote(0, loss_finite=finite, scale=scaler.scale.clone())
        if self.note is not None:
            # It adds to gradients that were left scaled.
            note.loss_finite = finite.logical_and(self.note.loss_finite.to(finite.device))
            note.graphs = [*self.note.graphs]
        self.note = note

    def went(self, loss: torch.Tensor) -> None:
        """The backward of ``loss`` is over."""
        if self.note is not None:
            self.note.graphs = released([*self.note.graphs, loss.grad_fn])

    def taken(self) -> None:
        """Count a step."""
        self._session.count(skipped=False)
        self.note = None

    def skipped(self, scaler: LossScaler) -> None:
        """Tell of a skipped step; ``LossScaleError`` where scaling cannot go on. Synchronises."""
        if self.note is not None:
            self._session.notes.append(self.note)
        self.note = None
        told = amp_state.verbosity
        ledger = Ledger([scaler], self._name_of, limit=MAX_SKIPS, verbosity=told)
        ledger.skipped(self._session)
