# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad in blocks."""

from __future__ import annotations

import math

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.blocks import Block, copy_
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work, norms_over
from preamp.kernels.joining import stack
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.novograd import next_norm, novograd_values
from preamp.kernels.rules import NovoGradRule, Update


@torch.no_grad()
def novograd_in_blocks(
    most: int,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensors,
    *,
    rule: NovoGradRule,
    update: Update,
) -> None:
    """Update in blocks of ``most`` elements; see `preamp.kernels.ops.Ops.novograd_`."""
    work = Work(update, params, grads, exp_avgs)
    if work.odd:
        columns = (params, grads, exp_avgs, norms)
        lists = ([column[place] for place in work.odd] for column in columns)
        reference.novograd_(*lists, rule=rule, update=update.at(work.odd))
        odd = set(work.odd)
        norms = [norm for place, norm in enumerate(norms) if place not in odd]
    order = math.inf if rule.uses_max_norm else 2.0

    def of_block(block: Block) -> tuple[torch.Tensor, ...]:
        slot = work.slot(block)
        return (slot.norms(slot.g, order),)

    for place, (norm, param) in enumerate(zip(norms, work.columns[0], strict=True)):
        if param.numel() == 0:  # not walked through; its norm is zero and may be the first one
            given = work.given_norms([place])
            now = norm.new_zeros(1) if given is None else given[0]
            _store([norm], next_norm(rule, norm.to(work.dtype), now), update)
    for part in work.parts(most):
        own = [norms[place] for place in part.places]
        given = work.given_norms(part.places)
        (now,) = norms_over(part, of_block, order) if given is None else given
        v = next_norm(rule, stack(own).to(work.dtype), now)
        for block in part.blocks:
            slot = work.slot(block)
            slot.store(*novograd_values(slot, slot.spread(v), rule, update.step))
        _store(own, v, update)


def _store(norms: list[torch.Tensor], values: torch.Tensor, update: Update) -> None:
    if update.found_inf is not None:
        skips = update.found_inf.to(values.device) != 0
        before = stack(norms)  # as they are stored: rounding a widened nan may change its bits
        values = torch.where(skips, before, values.to(before.dtype))
    copy_(norms, values.unbind())


def novograd_(*lists: Tensors, rule: NovoGradRule, update: Update) -> None:
    """See `preamp.kernels.ops.Ops.novograd_`."""
    novograd_in_blocks(elements(), *lists, rule=rule, update=update)
