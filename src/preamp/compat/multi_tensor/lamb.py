# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_lamb``, ``multi_tensor_lamb_mp``, and LAMB in two calls.

Apex leaves the updates in the gradients, or in a list of their own. So they are made first, as
what a step of size -1 from zero arrives at, and then applied by a step of LARS without momentum:
that is, with a rate for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import check_mode, checked
from preamp.core.dtypes import math_dtype
from preamp.kernels import LambRule, LarsRule, Scalar, Update, backend
from preamp.kernels.vectors import stack

Tensors = Sequence[torch.Tensor]
LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@dataclass(frozen=True, slots=True)
class _Decay:
    """Weight decay: how much, 0 in ``mode`` for L2, and whether tensors without have a rate."""

    weight: float
    mode: int
    use_nvlamb: bool | None

    @property
    def is_layerwise(self) -> bool:
        return bool(self.use_nvlamb) or self.weight != 0


def _rule(
    betas: tuple[float, float], eps: float, bias_correction: int, grad_averaging: int
) -> LambRule:
    """The rule that leaves the direction of a step where there was zero."""
    return LambRule(
        lr=-1.0,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=0.0,
        decoupled=True,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        uses_trust_ratio=False,
    )


def clip_factor(norm: torch.Tensor, largest: Scalar) -> torch.Tensor:
    """``largest / norm`` where the norm is larger, else 1; a ``largest`` of 0 clips nothing."""
    return torch.where((norm > largest) & (largest > 0), largest / norm, 1.0)


def _directions(lists: Sequence[Tensors], rule: LambRule, update: Update) -> list[torch.Tensor]:
    """Advance the moments; return the updates without decay, in the dtype of the arithmetic."""
    grads, params, exp_avgs, exp_avg_sqs = lists
    found = [torch.zeros_like(param, dtype=math_dtype(param.dtype)) for param in params]
    backend().lamb_(found, grads, exp_avgs, exp_avg_sqs, rule=rule, update=update)
    return found


def _apply_(params: Tensors, updates: Tensors, lr: Scalar, update: Update) -> None:
    """``p = p - lr * |p| / |u| * u``, with ``lr`` alone without norms or where one is zero."""
    rule = LarsRule(
        lr=lr,
        momentum=0.0,
        weight_decay=0.0,
        nesterov=False,
        trust_coefficient=1.0,
        eps=0.0,
        uses_trust_ratio=update.norms is not None,
    )
    unused = [torch.zeros_like(param, dtype=math_dtype(param.dtype)) for param in params]
    backend().lars_(params, updates, unused, rule=rule, update=update)


def _lamb_(
    lists: Sequence[Tensors], rule: LambRule, update: Update, lr: Scalar, decay: _Decay
) -> None:
    """Update ``(grads, params, exp_avgs, exp_avg_sqs)``; the updates go to the gradients."""
    grads, params, *moments = lists
    ops, weight = backend(), decay.weight
    told = replace(update, halves=None)
    decayed: Tensors = grads
    if weight and decay.mode == 0:
        factor = 1.0 if update.inv_scale is None else update.inv_scale
        decayed = [torch.empty_like(p, dtype=math_dtype(p.dtype)) for p in params]
        ops.axpby_(decayed, factor, grads, weight, params)
        told = replace(told, inv_scale=None)
    updates = _directions((decayed, params, *moments), rule, told)
    if weight and decay.mode == 1:
        ops.axpby_(updates, 1.0, updates, weight, params)
    norms = None
    if decay.is_layerwise:
        device = params[0].device
        norms = stack([ops.l2norms(params, None, device), ops.l2norms(updates, None, device)])
    for grad, value in zip(grads, updates, strict=True):
        if update.found_inf is None:
            grad.copy_(value)
        else:
            grad.copy_(torch.where(update.found_inf != 0, grad, value))
    _apply_(params, updates, lr, replace(update, inv_scale=None, norms=norms))


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
    rule = _rule((beta1, beta2), epsilon, bias_correction, grad_averaging)
    update = Update(step=step, inv_scale=clip_factor(norm, max_grad_norm))
    decay = _Decay(weight_decay, mode, use_nvlamb)
    _lamb_(call.lists, rule, update, lr, decay)


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
    found_inf = call.found_inf(noop_flag) + call.scalar("found_inf", found_inf).abs()
    rule = _rule((beta1, beta2), epsilon, bias_correction, grad_averaging)
    factor = clip_factor(norm, largest) * call.scalar("inv_scale", inv_scale)
    copies = call.lists[4] if len(call.lists) == 5 else None
    update = Update(step=count, inv_scale=factor, found_inf=found_inf, halves=copies)
    decay = _Decay(weight_decay, mode, use_nvlamb)
    _lamb_(call.lists[:4], rule, update, call.scalar("lr", lr), decay)


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
    rule = _rule((beta1, beta2), epsilon, bias_correction=1, grad_averaging=1)
    factor = clip_factor(given.to(torch.float32), max_global_grad_norm)
    *lists, targets = call.lists
    directions = _directions(lists, rule, Update(step=step + 1, inv_scale=factor))
    ops = backend()
    for place, target in enumerate(targets):
        direction, param = directions[place], lists[1][place]
        ops.axpby_([target], 1.0, [direction], decays[place], [param])


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
    norms = stack([param_norms, update_norms]) if use_nvlamb or weight_decay != 0 else None
    _apply_(params, updates, lr, Update(norms=norms))
