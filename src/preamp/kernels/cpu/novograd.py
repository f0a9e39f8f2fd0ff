# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad in blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.blocks import SMALL_BLOCK, Block, copy_
from preamp.kernels.cpu.updates import BlockSlot, Work, is_skipped, norms_over
from preamp.kernels.joining import stack
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.novograd import next_norm, novograd_values
from preamp.kernels.rules import NovoGradRule, Update


@torch.no_grad()
def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensors,
    *,
    rule: NovoGradRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.novograd_`."""
    if is_skipped(update):
        return
    work = Work(update, params, grads, exp_avgs)
    if work.odd:
        columns = (params, grads, exp_avgs, norms)
        lists = ([column[place] for place in work.odd] for column in columns)
        halves = update.halves and [update.halves[place] for place in work.odd]
        reference.novograd_(*lists, rule=rule, update=replace(update, halves=halves))
        odd = set(work.odd)
        norms = [norm for place, norm in enumerate(norms) if place not in odd]
    order = math.inf if rule.uses_max_norm else 2.0

    def of_block(block: Block) -> tuple[torch.Tensor, ...]:
        slot = BlockSlot(block, work.dtype, update.inv_scale)
        return (slot.norms(slot.g, order),)

    empty = [norm for norm, p in zip(norms, work.columns[0], strict=True) if p.numel() == 0]
    for norm in empty:  # not walked through, but their norm is zero and counts as a first one
        wide = norm.to(work.dtype)
        norm.copy_(next_norm(rule, wide, torch.zeros_like(wide)))
    for part in work.parts(SMALL_BLOCK):
        own = [norms[place] for place in part.places]
        (now,) = norms_over(part, of_block, order)
        v = next_norm(rule, stack(own).to(work.dtype), now)
        for block in part.blocks:
            slot = BlockSlot(block, work.dtype, update.inv_scale)
            slot.store(*novograd_values(slot, slot.spread(v), rule, update.step))
        copy_(own, v.unbind())
