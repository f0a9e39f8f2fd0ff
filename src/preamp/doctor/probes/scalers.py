# SPDX-License-Identifier: BSD-3-Clause
"""Probes on loss scalers: torch's, and preamp's under all of its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from preamp.core.pytree import tensors_in
from preamp.core.undo import UndoStack
from preamp.doctor.probes.watch import Watch, around
from preamp.scaling import LossScaler

Function = Callable[..., Any]


class ScalerProbes:
    """Everything that multiplies a loss."""

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        """Install the probes; ``undo`` takes them off."""
        self._watch = watch
        around(torch.amp.GradScaler, "scale", self._scale, undo)
        around(torch.amp.GradScaler, "unscale_", self._unscale, undo)
        around(torch.amp.GradScaler, "step", self._step, undo)
        around(LossScaler, "scale_loss", self._scale, undo)

    def _scale(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(scaler, *args, **kwargs)
        losses = args[0] if args else next(iter(kwargs.values()), None)
        if self._watch.is_active and (isinstance(scaler, LossScaler) or scaler.is_enabled()):
            for loss in tensors_in(losses):
                self._watch.tell("loss_made", loss)
            for scaled in tensors_in(result):
                # A loss that is not in the graph is scaled for its value only.
                if scaled.requires_grad:
                    self._watch.seen.scaled[scaled] = scaler
        return result

    def _unscale(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(scaler, *args, **kwargs)
        optimizer = args[0] if args else kwargs.get("optimizer")
        if self._watch.is_active and isinstance(optimizer, torch.optim.Optimizer):
            if scaler.is_enabled():
                seen = self._watch.seen
                self._watch.attempt(seen.gradients.forget, seen.params(optimizer))
                seen.facts(optimizer).unscaled = True
        return result

    def _step(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = args[0] if args else kwargs.get("optimizer")
        if (
            not self._watch.is_active
            or not isinstance(optimizer, torch.optim.Optimizer)
            or not scaler.is_enabled()
        ):
            return function(scaler, *args, **kwargs)
        seen = self._watch.seen
        facts = seen.facts(optimizer)
        begun = facts.begun
        self._watch.tell("scaler_steps", optimizer)
        seen.stepping.append(optimizer)
        try:
            result = function(scaler, *args, **kwargs)
        finally:
            seen.stepping.remove(optimizer)
            facts.unscaled = False
        if facts.begun == begun:
            # A compiled step is not seen to begin, and was perhaps taken.
            facts.skipped += bool(begun or not seen.compiles)
            self._watch.step_taken()
        return result
