# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import AdamRule, BiasCorrection, Update
from preamp.kernels.triton.device.adam import adam_kernel
from preamp.kernels.triton.launch import scalar
from preamp.kernels.triton.update import leave, places


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
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    taken, others = places(*lists, update=update)
    corrects = rule.bias_correction is not BiasCorrection.NONE
    for part in taken:
        part.launch(
            adam_kernel,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.corrections(corrects, correction1=rule.beta1, correction2=rule.beta2),
            **part.numbers(
                beta1=rule.beta1,
                beta1_left=1 - rule.beta1,
                beta2=rule.beta2,
                beta2_left=1 - rule.beta2,
                eps=rule.eps,
                weight_decay=rule.weight_decay,
            ),
            DECAYS=rule.weight_decay != 0,
            DECOUPLED=rule.decoupled,
            MOMENTS=rule.bias_correction is BiasCorrection.MOMENTS,
            STEP_SIZE=rule.bias_correction is BiasCorrection.STEP_SIZE,
            EPS_INSIDE_SQRT=rule.eps_inside_sqrt,
        )
    leave(reference.adam_, others, *lists, rule=rule, update=update)
