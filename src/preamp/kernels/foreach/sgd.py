# SPDX-License-Identifier: BSD-3-Clause
"""Gradient descent with momentum in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.sgd import sgd_slot
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
    work = Work(update, params, grads, momentum_buffers)
    work.leave_odd_to(reference.sgd_, rule)
    for slot in work.slots(elements()):
        sgd_slot(slot, rule, update.step)
