# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_adam`` and its capturable forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, check_mode, checked
from preamp.core.dtypes import dtype_name, math_dtype
from preamp.kernels import AdamRule, BiasCorrection, Scalar, Update, backend

LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


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


def _rule(
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    mode: int,
    bias_correction: int,
) -> AdamRule:
    return AdamRule(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=BiasCorrection.MOMENTS if bias_correction else BiasCorrection.NONE,
    )


def _capturable(
    call: Call,
    rule: AdamRule,
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lists: Sequence[Sequence[torch.Tensor]],
    copies: Sequence[torch.Tensor] | None = None,
) -> None:
    """Update, and unscale the gradients in memory as well; neither where the flag is set."""
    step, scale = call.scalar("step", scalars[0], torch.int32), call.scalar("inv_scale", scalars[1])
    found_inf = call.found_inf(scalars[2])
    grads, params, exp_avgs, exp_avg_sqs = lists
    update = Update(step=step, inv_scale=scale, found_inf=found_inf, halves=copies)
    ops = backend()
    ops.adam_(params, grads, exp_avgs, exp_avg_sqs, rule=rule, update=update)
    ops.scale_add_(grads, torch.where(found_inf != 0, 1.0, scale), [None] * len(grads))


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
    rule = _rule(lr, (beta1, beta2), epsilon, weight_decay, mode, bias_correction)
    grads, params, exp_avgs, exp_avg_sqs = call.lists
    backend().adam_(params, grads, exp_avgs, exp_avg_sqs, rule=rule, update=Update(step=step))


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
    rate = call.scalar("lr", lr)
    rule = _rule(rate, (beta1, beta2), epsilon, weight_decay, mode, bias_correction)
    _capturable(call, rule, (step, inv_scale, noop_flag), call.lists)


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
        lr: As there, like all that follows.
        beta1: As there.
        beta2: As there.
        epsilon: As there.
        step: As there.
        mode: As there.
        bias_correction: As there.
        weight_decay: As there.
        inv_scale: As there.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Gradients, parameters, moments and masters.
    """
    del chunk_size
    name = "multi_tensor_adam_capturable_master"
    call = _checked(name, tensor_lists, mode, masters=("masters",))
    rate = call.scalar("lr", lr)
    rule = _rule(rate, (beta1, beta2), epsilon, weight_decay, mode, bias_correction)
    grads, params, exp_avgs, exp_avg_sqs, masters = call.lists
    lists = (grads, masters, exp_avgs, exp_avg_sqs)
    _capturable(call, rule, (step, inv_scale, noop_flag), lists, copies=params)
