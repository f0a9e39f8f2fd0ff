# SPDX-License-Identifier: BSD-3-Clause
"""LARS: two norms per tensor, then the update."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import LarsRule, Update
from preamp.kernels.triton.device.lars import lars_kernel
from preamp.kernels.triton.launch import scalar
from preamp.kernels.triton.update import leave, places


@torch.no_grad()
def lars_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: LarsRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lars_`."""
    lists = (params, grads, momentum_buffers)
    taken, others = places(*lists, update=update)
    for part in taken:
        p_norms = g_norms = part.entries.layout
        known = part.given_norms()
        if known is not None:
            p_norms, g_norms = known
        elif rule.uses_trust_ratio:
            p_norms, g_norms = part.norms("P"), part.norms("G", update.inv_scale)
        part.launch(
            lars_kernel,
            p_norms=p_norms,
            g_norms=g_norms,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.numbers(
                momentum=rule.momentum,
                weight_decay=rule.weight_decay,
                trust_coefficient=rule.trust_coefficient,
                eps=rule.eps,
            ),
            NESTEROV=rule.nesterov,
            TRUST_RATIO=rule.uses_trust_ratio,
        )
    leave(reference.lars_, others, *lists, rule=rule, update=update)
