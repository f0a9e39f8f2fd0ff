# SPDX-License-Identifier: BSD-3-Clause
"""LARS in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.blocks import Block
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work, norms_over
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.lars import lars_rate, lars_slot
from preamp.kernels.rules import LarsRule, Update


@torch.no_grad()
def lars_in_blocks(
    most: int,
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: LarsRule,
    update: Update,
) -> None:
    """Update in blocks of ``most`` elements; see `preamp.kernels.ops.Ops.lars_`."""
    work = Work(update, params, grads, momentum_buffers)
    work.leave_odd_to(reference.lars_, rule)

    def norms(block: Block) -> tuple[torch.Tensor, ...]:
        slot = work.slot(block)
        return slot.norms(slot.p), slot.norms(slot.g)

    for part in work.parts(most):
        rate = work.each(part, rule.lr)
        if rule.uses_trust_ratio:
            given = work.given_norms(part.places)
            p_norms, g_norms = norms_over(part, norms) if given is None else given
            rate = lars_rate(rate, p_norms, g_norms, rule)
        for block in part.blocks:
            slot = work.slot(block)
            lars_slot(slot, slot.spread(rate), rule)


def lars_(*lists: Tensors, rule: LarsRule, update: Update) -> None:
    """See `preamp.kernels.ops.Ops.lars_`."""
    lars_in_blocks(elements(), *lists, rule=rule, update=update)
