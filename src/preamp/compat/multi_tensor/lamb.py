# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_lamb`` and ``multi_tensor_lamb_mp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import Scalar, corrections, store_
from preamp.compat.multi_tensor.checks import check_mode, checked
from preamp.compat.multi_tensor.lamb_rule import (
    LambRule,
    apply_updates_,
    clip_divisor,
    lamb_updates,
    norms_of,
    trust_rates,
)

LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """One LAMB step, which leaves the updates in the gradients. Does not synchronise.

        g = grad / max(1, |G| / max)
        m = beta1 * m + beta3 * g
        v = beta2 * v + (1 - beta2) * g²
        u = (m / c1) / (sqrt(v / c2) + eps) + wd * p
        p = p - lr * |p| / |u| * u

    with ``c = 1 - beta ** step``, and ``beta3`` being ``1 - beta1`` if averaging, else 1. In mode
    0 the decay ``wd * p`` is added to ``g`` instead. The step is ``lr * u`` where either norm is
    0, and wherever ``wd`` is 0 unless ``use_nvlamb``. Source: You et al., 2020.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``, each of any floating dtype.
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        step: Counts from 1.
        bias_correction: Whether to divide by ``c1`` and ``c2``.
        weight_decay: ``wd``.
        grad_averaging: Whether ``beta3`` is ``1 - beta1``.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        global_grad_norm: ``|G|``: float32, one element.
        max_grad_norm: ``max``; 0 clips nothing, where Apex would zero the gradients.
        use_nvlamb: Whether tensors without decay have a rate of their own too.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Gradients, parameters and moments.
    """
    del chunk_size
    call = checked("multi_tensor_lamb", tensor_lists, LISTS)
    call.flag(noop_flag)
    check_mode(call, mode)
    norm = call.scalar("global_grad_norm", global_grad_norm)
    rule = LambRule(
        betas=(beta1, beta2),
        eps=epsilon,
        grad_weight=1 - beta1 if grad_averaging else 1.0,
        decoupled=mode == 1,
        corrections=corrections((beta1, beta2), step, bias_correction),
        clip_divisor=clip_divisor(norm, max_grad_norm),
    )
    layerwise = bool(use_nvlamb) or weight_decay != 0
    _lamb_(call.lists, rule, (lr, weight_decay), layerwise=layerwise)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: torch.Tensor,
    use_nvlamb: bool | None,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """As `multi_tensor_lamb` on scaled gradients, with all that varies on the device.

    Does not synchronise, so it can be captured in a CUDA graph.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``, and optionally ``copies`` that
            receive the rounded parameters.
        lr: float32, shape ``(1,)``.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        step: int32, shape ``(1,)``; counts from 1.
        bias_correction: Whether to divide by ``c1`` and ``c2``.
        weight_decay: ``wd``.
        grad_averaging: Whether ``beta3`` is ``1 - beta1``.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        global_grad_norm: float32, shape ``(1,)``: norm of the scaled gradients.
        max_grad_norm: float32, shape ``(1,)``: times the loss scale as well; 0 clips nothing.
        use_nvlamb: Whether tensors without decay have a rate of their own too.
        found_inf: float32, shape ``(1,)``; nothing is changed where it is not 0.
        inv_scale: float32, shape ``(1,)``: what removes the loss scale.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Gradients, parameters, moments and copies.
    """
    del chunk_size
    call = checked("multi_tensor_lamb_mp", tensor_lists, LISTS, ("copies",))
    check_mode(call, mode)
    count = call.scalar("step", step, torch.int32)
    norm = call.scalar("global_grad_norm", global_grad_norm)
    largest = call.scalar("max_grad_norm", max_grad_norm)
    skip = (call.flag(noop_flag) != 0) | (call.scalar("found_inf", found_inf) != 0)
    rule = LambRule(
        betas=(beta1, beta2),
        eps=epsilon,
        grad_weight=1 - beta1 if grad_averaging else 1.0,
        decoupled=mode == 1,
        corrections=corrections((beta1, beta2), count, bias_correction),
        grad_factor=call.scalar("inv_scale", inv_scale),
        clip_divisor=clip_divisor(norm, largest),
        skip=skip,
    )
    rate = call.scalar("lr", lr)
    layerwise = bool(use_nvlamb) or weight_decay != 0
    lists, copies = call.lists[:4], call.lists[4] if len(call.lists) == 5 else None
    _lamb_(lists, rule, (rate, weight_decay), copies, layerwise=layerwise)


def _lamb_(
    lists: Sequence[Sequence[torch.Tensor]],
    rule: LambRule,
    rate_and_decay: tuple[Scalar, float],
    copies: Sequence[torch.Tensor] | None = None,
    *,
    layerwise: bool,
) -> None:
    """Apply ``rule`` to ``(grads, params, exp_avgs, exp_avg_sqs)``; updates go to grads."""
    grads, params = lists[0], lists[1]
    lr, decay = rate_and_decay
    updates = lamb_updates(lists, rule, [decay] * len(grads))
    rates: Sequence[Scalar] = [lr] * len(params)
    if layerwise:
        rates = trust_rates(norms_of(params), norms_of(updates), lr)
    for grad, update in zip(grads, updates, strict=True):
        store_(grad, update, rule.skip)
    apply_updates_(params, updates, rates, copies, rule.skip)
