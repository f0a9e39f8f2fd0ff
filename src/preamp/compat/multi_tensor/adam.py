# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_adam`` and its capturable forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import Scalar, corrections, store_, wide
from preamp.compat.multi_tensor.checks import Call, check_mode, checked
from preamp.core.dtypes import dtype_name, math_dtype

LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule:
    """One Adam step, apart from its tensors.

    Attributes:
        lr: Step size.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Added to the gradient, or to the update if ``decoupled``.
        decoupled: Whether it is AdamW.
        corrections: ``1 - beta ** step`` for both moments, or ones.
        inv_scale: Removes the loss scale from the gradients, in place.
        skip: Scalar; nothing changes where it is true.
    """

    lr: Scalar
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    corrections: tuple[Scalar, Scalar]
    inv_scale: torch.Tensor | None = None
    skip: torch.Tensor | None = None


def _checked(op: str, tensor_lists: TensorLists, mode: int, masters: Sequence[str] = ()) -> Call:
    call = checked(op, tensor_lists, (*LISTS, *masters))
    check_mode(call, mode)
    wanted = torch.float32 if masters else math_dtype(call.lists[1][0].dtype)
    for name, tensors in zip((*LISTS[2:], *masters), call.lists[2:], strict=True):
        if tensors[0].dtype is not wanted:
            raise call.refuse(
                f"{name} are {dtype_name(tensors[0].dtype)}",
                f"They are {dtype_name(wanted)} for {dtype_name(call.lists[1][0].dtype)} params",
                f"Convert them with .to({wanted}) after loading a checkpoint",
            )
    return call


def _adam_(
    lists: Sequence[Sequence[torch.Tensor]],
    rule: AdamRule,
    copies: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Apply ``rule`` to ``(grads, params, exp_avgs, exp_avg_sqs)`` and round params to copies."""
    copies = copies or [None] * len(lists[0])
    (beta1, beta2), (c1, c2), skip = rule.betas, rule.corrections, rule.skip
    for grad, param, exp_avg, exp_avg_sq, copy in zip(*lists, copies, strict=True):
        g, p = wide(grad), wide(param)
        if rule.inv_scale is not None:
            g = g * rule.inv_scale
            store_(grad, g, skip)
        if not rule.decoupled:
            g = g + rule.weight_decay * p
        m = beta1 * exp_avg + (1 - beta1) * g
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        update = (m / c1) / ((v / c2).sqrt() + rule.eps)
        if rule.decoupled:
            update = update + rule.weight_decay * p
        p = p - rule.lr * update
        for target, value in ((exp_avg, m), (exp_avg_sq, v), (param, p)):
            store_(target, value, skip)
        if copy is not None:
            store_(copy, param, skip)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One Adam or AdamW step. Does not synchronise.

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        p = p - lr * ((m / c1) / (sqrt(v / c2) + eps) + wd * p)

    with ``c = 1 - beta ** step``. In mode 0 the decay ``wd * p`` is added to ``g`` instead.
    Sources: Kingma and Ba, 2015; Loshchilov and Hutter, 2019.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``. Both moments are float32
            (float64 for float64 parameters).
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        step: Counts from 1.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        bias_correction: Whether to divide by ``c1`` and ``c2``.
        weight_decay: ``wd``.

    Raises:
        RuntimeError: The lists do not fit, a moment has another dtype, or ``mode`` is unknown.

    Mutates:
        Parameters and moments.
    """
    del chunk_size
    call = _checked("multi_tensor_adam", tensor_lists, mode)
    call.flag(noop_flag)
    rule = AdamRule(
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        corrections=corrections((beta1, beta2), step, bias_correction),
    )
    _adam_(call.lists, rule)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As `multi_tensor_adam`, with step size, step and loss scale on the device.

    Does not synchronise, so it can be captured in a CUDA graph.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``.
        lr: float32, shape ``(1,)``.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        step: int32, shape ``(1,)``; counts from 1.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        bias_correction: Whether to divide by ``c1`` and ``c2``.
        weight_decay: ``wd``.
        inv_scale: float32, shape ``(1,)``; gradients are multiplied by it in place.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Gradients, parameters and moments.
    """
    del chunk_size
    call = _checked("multi_tensor_adam_capturable", tensor_lists, mode)
    count = call.scalar("step", step, torch.int32)
    rule = AdamRule(
        lr=call.scalar("lr", lr),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        corrections=corrections((beta1, beta2), count, bias_correction),
        inv_scale=call.scalar("inv_scale", inv_scale),
        skip=call.flag(noop_flag) != 0,
    )
    _adam_(call.lists, rule)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As `multi_tensor_adam_capturable` on float32 masters, which parameters are rounded from.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs, masters]``; the values of
            ``params`` are not read.
        lr: float32, shape ``(1,)``.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added outside the root.
        step: int32, shape ``(1,)``; counts from 1.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        bias_correction: Whether to divide by ``c1`` and ``c2``.
        weight_decay: ``wd``.
        inv_scale: float32, shape ``(1,)``; gradients are multiplied by it in place.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Gradients, parameters, moments and masters.
    """
    del chunk_size
    name = "multi_tensor_adam_capturable_master"
    call = _checked(name, tensor_lists, mode, masters=("masters",))
    count = call.scalar("step", step, torch.int32)
    rule = AdamRule(
        lr=call.scalar("lr", lr),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        corrections=corrections((beta1, beta2), count, bias_correction),
        inv_scale=call.scalar("inv_scale", inv_scale),
        skip=call.flag(noop_flag) != 0,
    )
    grads, params, exp_avgs, exp_avg_sqs, wide_params = call.lists
    _adam_((grads, wide_params, exp_avgs, exp_avg_sqs), rule, copies=params)
