# SPDX-License-Identifier: BSD-3-Clause
"""What checkpoints say of a half weight: its float32 value, in and out. Methods of `Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from preamp.engine.params import twin_of

if TYPE_CHECKING:
    from preamp.engine.engine import Engine


def exact_value(self: Engine, half: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 value of ``half``, with what was written to it from outside.

    Raises:
        PreampStateError: This rank has a part of it only; see `Holding.value`.
    """
    twin = twin_of(half, self.sessions.values())
    if twin is None:
        return None
    twin.absorb_external_write()
    return twin.held.value()


def load_exact(self: Engine, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Set the master of ``half``, or this rank's part of it.

    Returns:
        What to round into ``half``; ``None`` if it has no master, or ``value`` another shape.
    """
    twin = twin_of(half, self.sessions.values())
    if twin is None or value.shape != half.shape:
        return None
    with torch.no_grad():
        twin.master.copy_(twin.held.own(value))
    return twin.master.detach() if twin.held.part is None else value.float()
