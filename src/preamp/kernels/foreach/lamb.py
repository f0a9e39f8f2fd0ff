# SPDX-License-Identifier: BSD-3-Clause
"""LAMB in blocks."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.foreach.blocks import Block, Part
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.foreach.updates import Work, norms_over
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.lamb import lamb_direction
from preamp.kernels.reference.update import both_nonzero
from preamp.kernels.rules import LambRule, Update


@torch.no_grad()
def lamb_in_blocks(
    most: int,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> None:
    """Update in blocks of ``most`` elements; see `preamp.kernels.ops.Ops.lamb_`.

    The direction of a step is computed twice, once for its norm: keeping it would take as much
    memory as the weights.
    """
    work = Work(update, params, grads, exp_avgs, exp_avg_sqs)
    work.leave_odd_to(reference.lamb_, rule)

    for part in work.parts(most):
        rate = work.each(part, rule.lr)
        if rule.uses_trust_ratio:
            given = work.given_norms(part.places)
            p_norms, u_norms = _measured(work, part, rule, update) if given is None else given
            ratio = p_norms / u_norms
            rate = rate * torch.where(both_nonzero(p_norms, u_norms), ratio, torch.ones_like(ratio))
        for block in part.blocks:
            slot = work.slot(block)
            u, m, v = lamb_direction(slot, rule, update.step)
            slot.store(slot.p - slot.spread(rate) * u, m, v)


def _measured(work: Work, part: Part, rule: LambRule, update: Update) -> list[torch.Tensor]:
    """``|p|`` and ``|u|`` of the tensors of a part."""

    def norms(block: Block) -> tuple[torch.Tensor, ...]:
        slot = work.slot(block)
        return slot.norms(slot.p), slot.norms(lamb_direction(slot, rule, update.step)[0])

    return norms_over(part, norms)


@torch.no_grad()
def lamb_norms_in_blocks(
    most: int, *lists: Tensors, rule: LambRule, update: Update
) -> torch.Tensor:
    """Measure in blocks of ``most`` elements; see `preamp.kernels.ops.Ops.lamb_norms`."""
    work = Work(update, *lists)
    if work.odd:
        return reference.lamb_norms(*lists, rule=rule, update=update)
    found = torch.zeros(2, len(lists[0]), dtype=work.dtype, device=lists[0][0].device)
    for part in work.parts(most):
        for row, norms in zip(found, _measured(work, part, rule, update), strict=True):
            for place, norm in zip(part.places, norms.unbind(), strict=True):
                row[place].copy_(norm)
    return found


def lamb_(*lists: Tensors, rule: LambRule, update: Update) -> None:
    """See `preamp.kernels.ops.Ops.lamb_`."""
    lamb_in_blocks(elements(), *lists, rule=rule, update=update)


def lamb_norms(*lists: Tensors, rule: LambRule, update: Update) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.lamb_norms`."""
    return lamb_norms_in_blocks(elements(), *lists, rule=rule, update=update)
