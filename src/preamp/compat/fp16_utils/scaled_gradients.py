# SPDX-License-Identifier: BSD-3-Clause
"""Gradients on their way from a scaled backward to the parameters that the optimizer has."""

from __future__ import annotations

import torch

from preamp.compat.fp16_utils.half_params import HalfParams
from preamp.core.tensors import version_of
from preamp.engine.overflow import GradientNote
from preamp.kernels import Ops
from preamp.optim import DirectGradients


class ScaledGradients:
    """Keeps the books on which gradients carry a loss scale, and which one.

    Gradients on half parameters stay scaled, so that autograd can go on adding to them; their
    masters get the unscaled sum. A gradient on a float32 parameter is the one the optimizer uses:
    what was unscaled already steps aside while a backward runs and is added afterwards.
    """

    def __init__(self, params: HalfParams, ops: Ops) -> None:
        """Start without gradients."""
        self._params = params
        self._ops = ops
        self._direct = DirectGradients(ops)
        self._scale: float | None = None
        self._unscaled: dict[int, tuple[torch.Tensor, int]] = {}
        # Whether a backward ran whose gradients have not reached the masters
        self.is_pending = False

    def begin(self, scale: float) -> None:
        """Prepare for a backward of the loss times ``scale``. Mutates gradients."""
        if not self.is_pending:
            self._direct.set_aside(self._params.directs)
        raw = self._params.halves + (self._params.directs if self.is_pending else [])
        grads = [param.grad for param in raw if param.grad is not None]
        if self._scale is not None and self._scale != scale:
            # The scale changed between two backwards that are summed: bring the first to it.
            with torch.no_grad():
                self._ops.scale_add_(grads, scale / self._scale, [None] * len(grads))
        self._scale = scale
        self.is_pending = True

    def finish(self, scale: float, note: GradientNote | None) -> torch.Tensor | None:
        """Bring the masters' and the float32 parameters' gradients up to date.

        ``scale`` is the current one; it counts for gradients of a backward that went past `begin`.
        ``note`` gets the largest magnitudes; without one overflow is not looked for. Returns
        ``found_inf`` of that census, a float32 scalar, or ``None``. Does not synchronise.
        """
        if self.is_pending and self._scale is not None:
            scale = self._scale
        directs = self._params.directs if self.is_pending else self._raw_directs()
        pairs = list(zip(self._params.halves, self._params.masters, strict=True))
        with torch.no_grad():
            self._fill_masters(pairs, 1.0 / scale)
        self._merge(directs, 1.0 / scale)
        found_inf = None if note is None else self._census(pairs, note)
        self._scale = scale
        self.is_pending = False
        return found_inf

    def forget(self) -> None:
        """The gradients were cleared."""
        self._direct.forget()
        self._unscaled.clear()
        self._scale = None
        self.is_pending = False

    def _raw_directs(self) -> list[torch.Tensor]:
        """Parameters without a master whose gradient changed since it was last unscaled."""
        raw: list[torch.Tensor] = []
        for param in self._params.directs:
            grad = param.grad
            known, version = self._unscaled.get(id(param), (None, -1))
            if grad is not None and (grad is not known or version_of(grad) != version):
                raw.append(param)
        return raw

    def _census(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], note: GradientNote
    ) -> torch.Tensor | None:
        # What an earlier backward left is looked at again: its overflow is in the sum.
        owners = pairs + [(param, param) for param in self._params.directs]
        found = [(half.grad, owner) for half, owner in owners if half.grad is not None]
        if not found:
            return None
        grads = [grad for grad, _ in found]
        census = self._ops.census(grads, grads[0].device)
        note.add([owner for _, owner in found], grads, census)
        return census.found_inf

    def _fill_masters(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], inverse: float) -> None:
        for _, master in pairs:
            master.grad = None  # also where the model has none: an old one must not be used again
        found = [(half.grad, master) for half, master in pairs if half.grad is not None]
        factors = {
            device: torch.tensor(inverse, dtype=torch.float32, device=device)
            for device in {grad.device for grad, _ in found}
        }
        wide = self._ops.widen_add(
            [grad for grad, _ in found],
            [factors[grad.device] for grad, _ in found],
            [None] * len(found),
        )
        for (_, master), grad in zip(found, wide, strict=True):
            master.grad = grad

    def _merge(self, directs: list[torch.Tensor], inverse: float) -> None:
        self._direct.merge(directs, None if inverse == 1.0 else torch.tensor(inverse))
        self._direct.commit(directs)
        self._unscaled = {
            id(param): (param.grad, version_of(param.grad))
            for param in self._params.directs
            if param.grad is not None
        }
