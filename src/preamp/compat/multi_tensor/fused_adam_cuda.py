# SPDX-License-Identifier: BSD-3-Clause
"""The names of Apex's compiled module ``fused_adam_cuda`` of 2018 and 2019."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import store_, wide
from preamp.compat.multi_tensor.checks import Call, checked
from preamp.core.dtypes import HALF_DTYPES, dtype_name

LISTS = ("params", "exp_avgs", "exp_avg_sqs", "grads")

__all__ = ["adam", "adam_mt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyAdamRule:
    """One step of Apex's first FusedAdam, apart from its tensors.

    Attributes:
        step_size: ``lr``, with the bias corrections of both moments.
        betas: Decay of the two moments.
        eps: Added inside or outside the root.
        eps_inside: Which of the two.
        scale: What gradients are divided by.
        weight_decay: Times the step size.
    """

    step_size: float
    betas: tuple[float, float]
    eps: float
    eps_inside: bool
    scale: float
    weight_decay: float


def _check(call: Call, eps_mode: int) -> None:
    """Parameters and moments have one wide dtype; gradients and copies may be half."""
    kinds = [tensors[0].dtype for tensors in call.lists]
    param = kinds[0]
    fits = param in (torch.float32, torch.float64) and set(kinds[1:3]) == {param}
    if not fits or any(kind not in (param, *HALF_DTYPES) for kind in kinds[3:]):
        raise call.refuse(
            f"the lists are {', '.join(map(dtype_name, kinds))}",
            "params and moments are float32, or all float64; grads and outputs are the same or "
            "float16 or bfloat16",
            "Keep float32 masters of half parameters",
        )
    if eps_mode not in (0, 1):
        raise call.refuse(
            f"eps_mode is {eps_mode!r}",
            "0 adds eps inside the root, 1 outside",
            "Pass 1 for the published method",
        )


def _adam_(lists: Sequence[Sequence[torch.Tensor]], rule: EarlyAdamRule) -> None:
    """Apply ``rule`` to ``(params, exp_avgs, exp_avg_sqs, grads)`` and perhaps outputs."""
    beta1, beta2 = rule.betas
    for param, exp_avg, exp_avg_sq, grad, *outputs in zip(*lists, strict=True):
        g = wide(grad) / rule.scale
        m = beta1 * exp_avg + (1 - beta1) * g
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        denominator = (v + rule.eps).sqrt() if rule.eps_inside else v.sqrt() + rule.eps
        p = param - rule.step_size * (m / denominator + rule.weight_decay * param)
        for target, value in ((exp_avg, m), (exp_avg_sq, v), (param, p)):
            store_(target, value)
        for output in outputs:
            store_(output, param)


def _step_size(lr: float, betas: tuple[float, float], step: int, bias_correction: int) -> float:
    if not bias_correction:
        return lr
    return lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def adam(
    p: torch.Tensor,
    out_p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """One step of Apex's first FusedAdam on one parameter. Does not synchronise.

        m = beta1 * m + (1 - beta1) * g / c
        v = beta2 * v + (1 - beta2) * (g / c)²
        s = lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step)
        p = p - s * (m / (sqrt(v) + eps) + wd * p)

    Unlike in `torch.optim.AdamW`, ``eps`` is not bias-corrected and the decay is.

    Args:
        p: float32 or float64.
        out_p: Receives the rounded result; no elements for none. Apex wrote it for float16
            gradients only.
        m: First moment, as ``p``.
        v: Second moment, as ``p``.
        g: Gradient: as ``p``, float16 or bfloat16.
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        grad_scale: ``c``: the loss scale, and what clips.
        step: Counts from 1.
        eps_mode: 0 for ``sqrt(v + eps)``, 1 for ``sqrt(v) + eps``.
        bias_correction: Whether ``s`` is corrected, or else ``lr``.
        decay: ``wd``.

    Raises:
        RuntimeError: The tensors do not fit.

    Mutates:
        ``p``, ``m``, ``v`` and ``out_p``.
    """
    lists = [[p], [m], [v], [g]]
    if out_p.numel():
        lists.append([out_p])
    call = checked("adam", lists, LISTS, ("outputs",))
    _check(call, eps_mode)
    rule = EarlyAdamRule(
        step_size=_step_size(lr, (beta1, beta2), step, bias_correction),
        betas=(beta1, beta2),
        eps=eps,
        eps_inside=eps_mode == 0,
        scale=grad_scale,
        weight_decay=decay,
    )
    _adam_(call.lists, rule)


def adam_mt(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """As `adam`, on lists. Does not synchronise.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[params, exp_avgs, exp_avg_sqs, grads]``, and optionally ``outputs``.
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        grad_scale: What gradients are divided by.
        step: Counts from 1.
        eps_mode: 0 for ``sqrt(v + eps)``, 1 for ``sqrt(v) + eps``.
        bias_correction: Whether the step size is corrected.
        decay: Weight decay.

    Raises:
        RuntimeError: The lists do not fit.

    Mutates:
        Parameters, moments and outputs.
    """
    del chunk_size
    call = checked("adam_mt", tensor_lists, LISTS, ("outputs",))
    call.flag(noop_flag)
    _check(call, eps_mode)
    rule = EarlyAdamRule(
        step_size=_step_size(lr, (beta1, beta2), step, bias_correction),
        betas=(beta1, beta2),
        eps=eps,
        eps_inside=eps_mode == 0,
        scale=grad_scale,
        weight_decay=decay,
    )
    _adam_(call.lists, rule)
