# SPDX-License-Identifier: BSD-3-Clause
"""Probes on loss scalers: torch's, and preamp's under all of its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

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
            for loss in _tensors_in(losses):
                self._watch.tell("loss_made", loss)
            for scaled in _tensors_in(result):
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
        seen.stepping.append(optimizer)
        try:
            result = function(scaler, *args, **kwargs)
        finally:
            seen.stepping.remove(optimizer)
            facts.unscaled = False
        if facts.begun == begun:
            facts.skipped += 1
            self._watch.step_taken()
        return result


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        items = cast("Iterable[Any]", value)
        return [tensor for item in items for tensor in _tensors_in(item)]
    return []
