# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, slots
from preamp.kernels.rules import AdagradRule, Update


@torch.no_grad()
def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, *, rule: AdagradRule, update: Update
) -> None:
    """See `preamp.kernels.ops.Ops.adagrad_`."""
    for slot in slots(params, grads, sums, update=update):
        adagrad_slot(slot, rule)


def adagrad_slot(slot: Slot, rule: AdagradRule) -> None:
    """Update one slot."""
    p, g, (h,) = slot.p, slot.g, slot.state
    if rule.weight_decay != 0 and not rule.decoupled:
        g = g + rule.weight_decay * p
    h = h + g * g
    direction = g / (h.sqrt() + rule.eps)
    if rule.weight_decay != 0 and rule.decoupled:
        direction = direction + rule.weight_decay * p
    slot.store(p - slot.scalar(rule.lr) * direction, h)
