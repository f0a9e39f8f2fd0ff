# SPDX-License-Identifier: BSD-3-Clause
"""Gradient descent with momentum, the definition."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot, slots
from preamp.kernels.rules import SgdRule, Update


@torch.no_grad()
def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: SgdRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.sgd_`."""
    for slot in slots(params, grads, momentum_buffers, update=update):
        sgd_slot(slot, rule, update.step)


def sgd_slot(slot: Slot, rule: SgdRule, step: int | torch.Tensor) -> None:
    """Update one slot."""
    decays = rule.weight_decay != 0
    p, g, (m,) = slot.p, slot.g, slot.state
    if decays and not rule.decays_after_momentum:
        g = g + rule.weight_decay * p
    if rule.momentum != 0:
        later = rule.momentum * m + (1 - rule.dampening) * g
        m = _first_or(later, g, step)
        g = g + rule.momentum * m if rule.nesterov else m
    if decays and rule.decays_after_momentum:
        g = g + rule.weight_decay * p
    slot.store(p - slot.scalar(rule.lr) * g, *([m] if rule.momentum != 0 else []))


def _first_or(later: torch.Tensor, first: torch.Tensor, step: int | torch.Tensor) -> torch.Tensor:
    if isinstance(step, torch.Tensor):
        return torch.where(step.to(first.device) == 1, first, later)
    return first if step == 1 else later
