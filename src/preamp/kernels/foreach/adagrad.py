# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.adagrad import adagrad_slot
from preamp.kernels.rules import AdagradRule, Update


@torch.no_grad()
def adagrad_(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    rule: AdagradRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.adagrad_`."""
    work = Work(update, params, grads, sums)
    work.leave_odd_to(reference.adagrad_, rule)
    for slot in work.slots(elements()):
        adagrad_slot(slot, rule)
