# SPDX-License-Identifier: BSD-3-Clause
"""The names of Apex's compiled module ``fused_adam_cuda`` of 2018 and 2019."""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, checked
from preamp.core.dtypes import HALF_DTYPES, dtype_name
from preamp.kernels import Update, backend
from preamp.kernels.rules import AdamRule, BiasCorrection

LISTS = ("params", "exp_avgs", "exp_avg_sqs", "grads")

__all__ = ["adam", "adam_mt"]


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


def _adam_(
    call: Call,
    numbers: tuple[float, float, float, float, float],
    scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
) -> None:
    _check(call, eps_mode)
    lr, beta1, beta2, eps, decay = numbers
    rule = AdamRule(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=decay,
        decoupled=True,
        bias_correction=BiasCorrection.STEP_SIZE if bias_correction else BiasCorrection.NONE,
        eps_inside_sqrt=eps_mode == 0,
    )
    params, exp_avgs, exp_avg_sqs, grads, *outputs = call.lists
    halves = outputs[0] if outputs else None
    update = Update(step=step, inv_scale=call.factor(1.0 / scale), halves=halves)
    backend().update_(params, grads, exp_avgs, exp_avg_sqs, rule=rule, update=update)


def adam(
    p: torch.Tensor, out_p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    lr: float, beta1: float, beta2: float, eps: float, grad_scale: float, step: int, eps_mode: int,
    bias_correction: int, decay: float,
) -> None:  # fmt: skip
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
        eps: Added to the denominator.
        grad_scale: ``c``: the loss scale, and what clips.
        step: Counts from 1.
        eps_mode: 0 for ``sqrt(v + eps)``, 1 for ``sqrt(v) + eps``.
        bias_correction: Whether ``s`` is corrected, or else ``lr``.

    Mutates ``p``, ``m``, ``v`` and ``out_p``.
    """
    lists = [[p], [m], [v], [g]]
    if out_p.numel():
        lists.append([out_p])
    call = checked("adam", lists, LISTS, ("outputs",))
    _adam_(call, (lr, beta1, beta2, eps, decay), grad_scale, step, eps_mode, bias_correction)


def adam_mt(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: float, beta1: float, beta2: float, eps: float, grad_scale: float, step: int, eps_mode: int,
    bias_correction: int, decay: float,
) -> None:  # fmt: skip
    """As `adam`, on lists. Does not synchronise.

    Args:
        tensor_lists: ``[params, exp_avgs, exp_avg_sqs, grads]``, and optionally ``outputs``.

    Mutates parameters, moments and outputs.
    """
    call = checked("adam_mt", tensor_lists, LISTS, ("outputs",))
    call.flag(noop_flag)
    _adam_(call, (lr, beta1, beta2, eps, decay), grad_scale, step, eps_mode, bias_correction)
