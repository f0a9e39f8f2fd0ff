# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that the optimizer's side of a step reads and writes, by the rules of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.planning.layout import Slot
from preamp.policy import Policy


def optimizer_traffic(slots: Sequence[Slot], policy: Policy, state: int, *, is_fused: bool) -> int:
    """Count what finding overflows, unscaling, updating and rounding move at a level.

    Every tensor counts once for each time that a pass reads or writes it, and so do the ``state``
    bytes of the optimizer. One of preamp's (``is_fused``) takes half gradients as they are and
    rounds the masters while it has them at hand.
    """
    total = 2 * state
    is_scaled = policy.loss_scale != 1.0
    for slot in slots:
        if not (slot.is_parameter and slot.is_trainable):
            continue
        weight = slot.elements * slot.dtype_at(policy).itemsize
        wide = slot.elements * 4
        total += weight * policy.is_dynamic  # the census reads gradients
        if slot.has_master_at(policy):
            total += weight + 2 * wide + weight  # gradient, master, half weight
            if not is_fused:
                total += 2 * wide  # the master's gradient is written and read
                total += wide  # and the master is read once more to be rounded
        else:
            total += 3 * weight
            if is_scaled and slot.dtype_at(policy) is torch.float32:
                total += 2 * weight  # gradients are unscaled in place
    return total
