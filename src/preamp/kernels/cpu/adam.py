# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW in blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from preamp.kernels import reference
from preamp.kernels.cpu.sizes import large, small
from preamp.kernels.cpu.updates import WideGradients, constant, is_skipped, number
from preamp.kernels.foreach.updates import Work
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.adam import adam_slot
from preamp.kernels.rules import AdamRule, BiasCorrection, Update

_torch: Any = torch


@torch.no_grad()
def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: AdamRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.adam_`."""
    if is_skipped(update):
        return
    work = Work(update, params, grads, exp_avgs, exp_avg_sqs)
    work.leave_odd_to(reference.adam_, rule)
    if work.fits_fused() and _fits_torch(rule):
        _fused(work, rule, update)
    else:
        for slot in work.slots(small()):
            adam_slot(slot, rule, update.step)


def _fits_torch(rule: AdamRule) -> bool:
    return not rule.eps_inside_sqrt and rule.bias_correction is not BiasCorrection.STEP_SIZE


def _fused(work: Work, rule: AdamRule, update: Update) -> None:
    op = _torch._fused_adamw_ if rule.decoupled else _torch._fused_adam_
    # At step infinity the corrections 1 - beta**step are 1.
    corrects = rule.bias_correction is BiasCorrection.MOMENTS
    step = constant(number(update.step) if corrects else math.inf)
    options = {
        **{"lr": number(rule.lr), "beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.eps},
        **{"weight_decay": rule.weight_decay, "amsgrad": False, "maximize": False},
    }
    wide = WideGradients(work.dtype, update.inv_scale)
    for part in work.parts(large()):
        for block in part.blocks:
            params, _, exp_avgs, exp_avg_sqs, _ = block.columns
            steps = [step] * len(params)
            op(params, wide.of(block), exp_avgs, exp_avg_sqs, [], steps, **options)
            block.copy_column(0, -1)
    work.note_written()
