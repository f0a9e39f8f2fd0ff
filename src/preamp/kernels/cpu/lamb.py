# SPDX-License-Identifier: BSD-3-Clause
"""LAMB in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.blocks import SMALL_BLOCK, Block
from preamp.kernels.cpu.updates import BlockSlot, Work, is_skipped, norms_over, number
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.lamb import lamb_direction
from preamp.kernels.reference.update import both_nonzero
from preamp.kernels.rules import LambRule, Update


@torch.no_grad()
def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lamb_`.

    The direction of a step is computed twice, once for its norm: keeping it would take as much
    memory as the weights.
    """
    if is_skipped(update):
        return
    work = Work(update, params, grads, exp_avgs, exp_avg_sqs)
    work.leave_odd_to(reference.lamb_, rule)

    def norms(block: Block) -> tuple[torch.Tensor, ...]:
        slot = BlockSlot(block, work.dtype, update.inv_scale)
        return slot.norms(slot.p), slot.norms(lamb_direction(slot, rule, update.step)[0])

    for part in work.parts(SMALL_BLOCK):
        rate = torch.full((len(part.places),), number(rule.lr), dtype=work.dtype)
        if rule.uses_trust_ratio:
            p_norms, u_norms = norms_over(part, norms)
            ratio = p_norms / u_norms
            rate *= torch.where(both_nonzero(p_norms, u_norms), ratio, torch.ones_like(ratio))
        for block in part.blocks:
            slot = BlockSlot(block, work.dtype, update.inv_scale)
            u, m, v = lamb_direction(slot, rule, update.step)
            slot.store(slot.p - slot.spread(rate) * u, m, v)
