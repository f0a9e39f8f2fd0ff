# SPDX-License-Identifier: BSD-3-Clause
"""Gradient descent with momentum."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import SgdRule, Update
from preamp.kernels.triton.device.sgd import sgd_kernel
from preamp.kernels.triton.launch import scalar
from preamp.kernels.triton.update import leave, places


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
    lists = (params, grads, momentum_buffers)
    taken, others = places(*lists, update=update)
    decays = rule.weight_decay != 0
    for part in taken:
        part.launch(
            sgd_kernel,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.corrections(False),
            **part.numbers(
                momentum=rule.momentum,
                share=1 - rule.dampening,
                weight_decay=rule.weight_decay,
            ),
            HAS_MOMENTUM=rule.momentum != 0,
            NESTEROV=rule.nesterov,
            DECAYS_BEFORE=decays and not rule.decays_after_momentum,
            DECAYS_AFTER=decays and rule.decays_after_momentum,
        )
    leave(reference.sgd_, others, *lists, rule=rule, update=update)
