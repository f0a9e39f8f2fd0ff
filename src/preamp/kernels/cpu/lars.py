# SPDX-License-Identifier: BSD-3-Clause
"""LARS in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.blocks import SMALL_BLOCK, Block
from preamp.kernels.cpu.updates import BlockSlot, Work, is_skipped, norms_over, number
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.lars import lars_rate, lars_slot
from preamp.kernels.rules import LarsRule, Update


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
    if is_skipped(update):
        return
    work = Work(update, params, grads, momentum_buffers)
    work.leave_odd_to(reference.lars_, rule)

    def norms(block: Block) -> tuple[torch.Tensor, ...]:
        slot = BlockSlot(block, work.dtype, update.inv_scale)
        return slot.norms(slot.p), slot.norms(slot.g)

    for part in work.parts(SMALL_BLOCK):
        rate = torch.full((len(part.places),), number(rule.lr), dtype=work.dtype)
        if rule.uses_trust_ratio:
            p_norms, g_norms = norms_over(part, norms)
            rate = lars_rate(rate, p_norms, g_norms, rule)
        for block in part.blocks:
            slot = BlockSlot(block, work.dtype, update.inv_scale)
            lars_slot(slot, slot.spread(rate), rule)
