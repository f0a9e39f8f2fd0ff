# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad in blocks."""

from __future__ import annotations

from typing import Any

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.sizes import large, small
from preamp.kernels.cpu.updates import WideGradients, constant, is_skipped, number
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.adagrad import adagrad_slot
from preamp.kernels.rules import AdagradRule, Update

_torch: Any = torch


@torch.no_grad()
def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, *, rule: AdagradRule, update: Update
) -> None:
    """See `preamp.kernels.ops.Ops.adagrad_`."""
    if is_skipped(update):
        return
    work = Work(update, params, grads, sums)
    work.leave_odd_to(reference.adagrad_, rule)
    if work.fits_fused() and not (rule.decoupled and rule.weight_decay != 0):
        _fused(work, rule, update)
    else:
        for slot in work.slots(small()):
            adagrad_slot(slot, rule)


def _fused(work: Work, rule: AdagradRule, update: Update) -> None:
    step = constant(1.0)  # of no consequence: it only counts for a decay of the learning rate
    options = {
        **{"lr": number(rule.lr), "lr_decay": 0.0, "weight_decay": rule.weight_decay},
        **{"eps": rule.eps, "maximize": False},
    }
    wide = WideGradients(work.dtype, update.inv_scale)
    for part in work.parts(large()):
        for block in part.blocks:
            params, _, sums, _ = block.columns
            steps = [step] * len(params)
            _torch._fused_adagrad_(params, wide.of(block), sums, steps, **options)
            block.copy_column(0, -1)
    work.note_written()
