# SPDX-License-Identifier: BSD-3-Clause
"""Gradient descent with momentum in blocks."""

from __future__ import annotations

from typing import Any

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.sizes import large, small
from preamp.kernels.cpu.updates import WideGradients, is_skipped, number
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.sgd import sgd_slot
from preamp.kernels.rules import SgdRule, Update

_torch: Any = torch


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
    if is_skipped(update):
        return
    work = Work(update, params, grads, momentum_buffers)
    work.leave_odd_to(reference.sgd_, rule)
    if work.fits_fused() and not rule.decays_after_momentum:
        _fused(work, rule, update)
    else:
        for slot in work.slots(small()):
            sgd_slot(slot, rule, update.step)


def _fused(work: Work, rule: SgdRule, update: Update) -> None:
    options = {
        **{"lr": number(rule.lr), "weight_decay": rule.weight_decay, "momentum": rule.momentum},
        **{"dampening": rule.dampening, "nesterov": rule.nesterov, "maximize": False},
    }
    is_first = rule.momentum != 0 and number(update.step) == 1
    wide = WideGradients(work.dtype, update.inv_scale)
    for part in work.parts(large()):
        for block in part.blocks:
            params, _, buffers, _ = block.columns
            kept = buffers if rule.momentum != 0 else []
            _torch._fused_sgd_(params, wide.of(block), kept, is_first_step=is_first, **options)
            block.copy_column(0, -1)
    work.note_written()
