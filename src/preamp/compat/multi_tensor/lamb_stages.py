# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_lamb_stage1_cuda`` and ``stage2``: LAMB in two calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import Scalar, store_
from preamp.compat.multi_tensor.checks import checked
from preamp.compat.multi_tensor.lamb_rule import (
    LambRule,
    apply_updates_,
    clip_divisor,
    lamb_updates,
    trust_rates,
)


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: torch.Tensor | float,
    max_global_grad_norm: float,
) -> None:
    """Write LAMB's updates; see `multi_tensor_lamb` for the formula. Does not synchronise.

    Decay is decoupled, gradients are averaged, and moments are corrected with the exponent
    ``step + 1``.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs, updates]``, each of any floating
            dtype.
        per_tensor_decay: float32, one weight decay for each tensor.
        step: Counts from 0.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        global_grad_norm: Number, or a tensor of one element on the CPU, where Apex wants it, or
            on the tensors' device.
        max_global_grad_norm: Larger norms are clipped to it; 0 clips nothing, where Apex would
            zero the gradients.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Moments and updates.
    """
    del chunk_size
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")
    call = checked("multi_tensor_lamb_stage1_cuda", tensor_lists, names)
    call.flag(noop_flag)
    decays = call.vector("per_tensor_decay", per_tensor_decay).unbind()
    given = call.number("global_grad_norm", global_grad_norm)
    if not isinstance(given, torch.Tensor):  # a scalar on the host goes with tensors anywhere
        given = torch.tensor(given, dtype=torch.float32, device="cpu")
    rule = LambRule(
        betas=(beta1, beta2),
        eps=epsilon,
        grad_weight=1 - beta1,
        decoupled=True,
        corrections=(1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)),
        clip_divisor=clip_divisor(given.to(torch.float32), max_global_grad_norm),
    )
    updates = lamb_updates(call.lists[:4], rule, decays)
    for target, update in zip(call.lists[4], updates, strict=True):
        store_(target, update)


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """``p = p - lr * |p| / |u| * u``. Does not synchronise.

    The rate is ``lr`` where either norm is 0, and wherever the decay is 0 unless ``use_nvlamb``.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[params, updates]``, each of any floating dtype.
        per_tensor_param_norm: ``|p|``: float32, one for each tensor.
        per_tensor_update_norm: ``|u|``: float32, one for each tensor.
        lr: Step size.
        weight_decay: Only whether it is 0 matters.
        use_nvlamb: Whether tensors without decay have a rate of their own too.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Parameters.
    """
    del chunk_size
    call = checked("multi_tensor_lamb_stage2_cuda", tensor_lists, ("params", "updates"))
    call.flag(noop_flag)
    param_norms = call.vector("per_tensor_param_norm", per_tensor_param_norm)
    update_norms = call.vector("per_tensor_update_norm", per_tensor_update_norm)
    params, updates = call.lists
    rates: Sequence[Scalar] = [lr] * len(params)
    if use_nvlamb or weight_decay != 0:
        rates = trust_rates(param_norms, update_norms, lr)
    apply_updates_(params, updates, rates)
