# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.adam import adam_slot
from preamp.kernels.rules import AdamRule, Update


@torch.no_grad()
def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: AdamRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.adam_`."""
    work = Work(update, params, grads, exp_avgs, exp_avg_sqs)
    work.leave_odd_to(reference.adam_, rule)
    for slot in work.slots(elements()):
        adam_slot(slot, rule, update.step)
