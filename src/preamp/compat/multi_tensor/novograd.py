# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_novograd``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import store_, wide
from preamp.compat.multi_tensor.checks import checked
from preamp.kernels import backend


@dataclass(frozen=True, slots=True, kw_only=True)
class NovoGradRule:
    """One NovoGrad step, apart from its tensors; see `multi_tensor_novograd`.

    Attributes:
        lr: Step size.
        betas: Decay of the moment and of the norms.
        eps: Added to the norm.
        weight_decay: Added to the gradient, or to the update unless ``inside``.
        grad_weight: What a gradient counts for in the moment.
        inside: Whether normalisation and decay happen inside the moment.
        corrections: Divisor of the moment, and of the norm.
        norm_type: 2, or 0 for the largest magnitude.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_weight: float
    inside: bool
    corrections: tuple[float, float]
    norm_type: int


def _novograd_(
    lists: Sequence[Sequence[torch.Tensor]], norms: torch.Tensor, rule: NovoGradRule
) -> None:
    """Apply ``rule`` to ``(grads, params, exp_avgs)`` and the running norms."""
    grads = lists[0]
    (beta1, beta2), (moment_divisor, norm_divisor) = rule.betas, rule.corrections
    if rule.norm_type == 2:
        now = backend().l2norms(grads, None, norms.device)
        norms.copy_((beta2 * norms.square() + (1 - beta2) * now.square()).sqrt())
    else:
        now = cast("torch.Tensor", backend().census(grads, norms.device).max_abs)
        norms.copy_(beta2 * norms + (1 - beta2) * now)
    divisors = (norms / norm_divisor + rule.eps).unbind()
    for grad, param, exp_avg, divisor in zip(*lists, divisors, strict=True):
        g, p = wide(grad), wide(param)
        if rule.inside:
            g = g / divisor + rule.weight_decay * p
        m = beta1 * wide(exp_avg) + rule.grad_weight * g
        update = m / moment_divisor
        if not rule.inside:
            update = update / divisor + rule.weight_decay * p
        store_(exp_avg, m)
        store_(param, p - rule.lr * update)


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    grad_norms: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """One NovoGrad step. Does not synchronise.

    With the norm ``n`` of each gradient,

        v = sqrt(beta2 * v² + (1 - beta2) * n²)    for the L2 norm
        v = beta2 * v + (1 - beta2) * n            for the largest magnitude
        d = v / sqrt(1 - beta2 ** step) + eps

    and then, in mode 0,

        m = beta1 * m + beta3 * (g / d + wd * p)
        p = p - lr * m / c1

    or, in mode 1,

        m = beta1 * m + beta3 * g
        p = p - lr * ((m / c1) / d + wd * p)

    where ``beta3`` is ``1 - beta1`` if averaging, else 1, and ``c1 = 1 - beta1 ** step``. Source:
    Ginsburg et al., 2019.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[grads, params, exp_avgs]``, each of any floating dtype.
        grad_norms: ``v``: float32, one running norm (not its square) for each tensor. What it
            holds before the first step is the caller's choice.
        lr: Step size.
        beta1: Decay of the moment.
        beta2: Decay of the norms.
        epsilon: Added to the norm.
        step: Counts from 1.
        bias_correction: Whether to divide by ``c1`` and by the root in ``d``.
        weight_decay: ``wd``.
        grad_averaging: Whether ``beta3`` is ``1 - beta1``.
        moment_mode: 0 normalises and decays inside the moment, 1 outside.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Parameters, moments and ``grad_norms``.
    """
    del chunk_size
    call = checked("multi_tensor_novograd", tensor_lists, ("grads", "params", "exp_avgs"))
    call.flag(noop_flag)
    if moment_mode not in (0, 1):
        raise call.refuse(
            f"moment_mode is {moment_mode!r}",
            "0 normalises and decays inside the moment, 1 outside",
            "Pass 1 for the form in which the moment holds plain gradients",
        )
    if norm_type not in (0, 2):
        raise call.refuse(
            f"norm_type is {norm_type!r}",
            "2 is the L2 norm, 0 the largest magnitude",
            "Pass 2 for the published method",
        )
    corrections = (1 - beta1**step, math.sqrt(1 - beta2**step)) if bias_correction else (1.0, 1.0)
    rule = NovoGradRule(
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        grad_weight=1 - beta1 if grad_averaging else 1.0,
        inside=moment_mode == 0,
        corrections=corrections,
        norm_type=norm_type,
    )
    _novograd_(call.lists, call.vector("grad_norms", grad_norms), rule)
