# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad: the norm of each gradient, its moving average, then the update."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import NovoGradRule, Update
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.novograd import average_norms, novograd_kernel
from preamp.kernels.triton.launch import given, launch, scalar
from preamp.kernels.triton.update import leave, places


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
    taken, others = places(params, grads, exp_avgs, update=update, norms=norms)
    for part in taken:
        known = part.given_norms()
        if known is not None:
            measured = known[0]
        else:
            measured = (part.max_norms if rule.uses_max_norm else part.norms)("G", update.inv_scale)
        averages = torch.empty_like(measured)
        launch(
            average_norms,
            (part.entries.count,),
            part.entries,
            norms=measured,
            averages=averages,
            **part.numbers(beta2=rule.beta2, beta2_left=1 - rule.beta2),
            **given("found_inf", update.found_inf, part.entries),
            N=KINDS[part.dtypes["N"]],
            ROW=3 if part.dtypes["H"] is None else 4,
            MATH=KINDS[part.math],
            USES_MAX=rule.uses_max_norm,
        )
        part.launch(
            novograd_kernel,
            averages=averages,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.corrections(
                rule.bias_correction, correction1=rule.beta1, correction2=rule.beta2
            ),
            **part.numbers(
                beta1=rule.beta1,
                beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
                eps=rule.eps,
                weight_decay=rule.weight_decay,
            ),
            INSIDE_MOMENT=rule.decays_inside_moment,
        )
    leave(reference.novograd_, others, params, grads, exp_avgs, norms, rule=rule, update=update)
