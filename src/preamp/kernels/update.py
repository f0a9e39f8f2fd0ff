# SPDX-License-Identifier: BSD-3-Clause
"""What one update is told besides its rule and its tensors, by every back end in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from preamp.kernels.plans import Standing
from preamp.kernels.stored import Stored

Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor that a back end reads on the device, without synchronising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update is told besides its rule and its tensors; the same for every rule."""

    # Number of this update, counted from 1, for bias corrections and first-run cases. A 0-dim
    # integer tensor is read on the device. The caller owns and advances it; where ``found_inf``
    # may be set it advances a tensor only if it is not.
    step: int | torch.Tensor = 1
    # float32 scalar (or float64, for float64 tensors) that every gradient is multiplied by after
    # widening. Gradients themselves are never written.
    inv_scale: torch.Tensor | None = None
    # float32 scalar. Anything but zero makes the whole update a no-op: parameters, state and
    # halves keep every bit. Decided on the device.
    found_inf: torch.Tensor | None = None
    # For each parameter a tensor that gets the new value rounded to its own dtype, or ``None``.
    # Always rounded from the parameter as stored, so that a half weight equals its rounded master
    # bitwise.
    halves: Sequence[torch.Tensor | None] | None = None
    # Whether half tensors beside wider parameters are weights, which anyone may have written: the
    # update starts from `preamp.kernels.stored.taken_over`. Else they are places for results.
    halves_lead: bool = True
    # The norms that the rule needs, shape ``(k, n)``, in place of those of the tensors given:
    # these are parts of larger ones. ``|p|`` and ``|u|`` for LAMB, ``|p|`` and ``|g|`` for LARS,
    # that of the gradient for NovoGrad. Other rules ignore it.
    norms: torch.Tensor | None = None
    # How lists are kept that are no plain tensors; `preamp.kernels.stored` defines the formats.
    # Parameters with an int16 tensor beside them are half tensors, and ``halves`` is not given.
    stored: Stored | None = None
    # Kept by whoever updates the same lists again and again; see `Standing` for what it promises.
    standing: Standing | None = None

    def at(self, places: Sequence[int]) -> Update:
        """What is told of the tensors at ``places`` alone."""
        halves = None if self.halves is None else [self.halves[place] for place in places]
        stored = None if self.stored is None else self.stored.at(places)
        norms = norms_at(self.norms, places)
        return replace(self, halves=halves, norms=norms, stored=stored, standing=None)


def norms_at(norms: torch.Tensor | None, places: Sequence[int]) -> torch.Tensor | None:
    """The columns of ``norms`` at ``places``; no index, whose upload would be waited for."""
    if norms is None or len(places) == norms.shape[1]:
        return norms
    if not places:
        return norms[:, :0]
    return torch.stack([norms[:, place] for place in places], dim=1)
