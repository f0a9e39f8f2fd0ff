# SPDX-License-Identifier: BSD-3-Clause
"""LAMB: the norms of parameter and update, then the update once more and its store."""

from __future__ import annotations

from typing import Any

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import LambRule, Update
from preamp.kernels.triton.device.lamb import lamb_kernel
from preamp.kernels.triton.launch import scalar
from preamp.kernels.triton.reductions import gather
from preamp.kernels.triton.update import Places, leave, places


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
    """See `preamp.kernels.ops.Ops.lamb_`."""
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    taken, others = places(*lists, update=update)
    for part in taken:
        arguments = _arguments(rule, part)
        norms = part.given_norms()
        if norms is None:
            norms = part.empty(2, part.entries.count)
            if rule.uses_trust_ratio:
                _measure(part, norms, arguments)
        part.launch(lamb_kernel, norms=norms, MEASURE=False, **arguments)
    leave(reference.lamb_, others, *lists, rule=rule, update=update)


@torch.no_grad()
def lamb_norms(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.lamb_norms`."""
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    taken, others = places(*lists, update=update)
    if others or len(taken) != 1:
        return reference.lamb_norms(*lists, rule=rule, update=update)
    norms = taken[0].empty(2, len(params))
    _measure(taken[0], norms, _arguments(rule, taken[0]))
    return norms


def _measure(part: Places, norms: torch.Tensor, arguments: dict[str, Any]) -> None:
    partials = part.empty(2, part.entries.chunks)
    part.launch(lamb_kernel, norms=partials, MEASURE=True, **arguments)
    for sums, results in zip(partials, norms, strict=True):
        gather(part.entries, sums, results, largest=False)


def _arguments(rule: LambRule, part: Places) -> dict[str, Any]:
    """What both launches of a part take."""
    return {
        **scalar("lr", rule.lr, part.entries, part.math),
        **part.corrections(rule.bias_correction, correction1=rule.beta1, correction2=rule.beta2),
        **part.numbers(
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
        "CORRECTS": rule.bias_correction,
        "TRUST_RATIO": rule.uses_trust_ratio,
    }
