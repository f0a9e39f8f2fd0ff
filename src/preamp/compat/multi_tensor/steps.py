# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer steps of ``amp_C``.

Apex's LAMB leaves the updates in the gradients. So they are made first, as what a step of size -1
from zero arrives at, and then applied by a step of LARS without momentum: that is, with a rate for
each tensor.

Signatures are Apex's, and have several arguments on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, check_mode, checked
from preamp.core.dtypes import HALF_DTYPES, dtype_name, math_dtype
from preamp.kernels import Scalar, Update, backend
from preamp.kernels.rules import AdamRule, BiasCorrection, LambRule, LarsRule, SgdRule
from preamp.kernels.vectors import stack

Tensors = Sequence[torch.Tensor]
LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def _check_dtypes_of_sgd(call: Call) -> None:
    """One dtype for all; or float32 with half copies, where the gradients may be half as well."""
    kinds = [tensors[0].dtype for tensors in call.lists]
    if len(kinds) == 3:
        fits = len(set(kinds)) == 1
    else:
        grad, param, momentum, copy = kinds
        fits = copy in HALF_DTYPES and grad in (copy, torch.float32)
        fits = fits and param is momentum is torch.float32
    if not fits:
        raise call.refuse(
            f"the lists are {', '.join(map(dtype_name, kinds))}",
            "Without copies all have one dtype; with half copies, params and momentum_buffers are "
            "float32 and grads either float32 or of the copies' dtype",
            "Sort the parameters by dtype and call the op once for each",
        )


def multi_tensor_sgd(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    weight_decay: float, momentum: float, dampening: float, learning_rate: float, nesterov: bool,
    first_run: bool, weight_decay_after_momentum: bool, scale: float,
) -> None:  # fmt: skip
    """One SGD step. Does not synchronise.

        g = scale * grad + wd * p
        m = momentum * m + (1 - dampening) * g
        p = p - lr * m

    On the first run ``m`` is ``g``. With ``nesterov`` the step is ``g + momentum * m``, without
    momentum ``g``. Source: Sutskever et al., 2013.

    Results are rounded once. Apex rounds the step of a float16 parameter and then the sum, which
    is off by up to half a unit in the last place of the step more.

    Args:
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, momentum_buffers]`` of one dtype, or the same with a
            fourth list ``copies`` of half parameters, where params and buffers are float32 and
            gradients float32 or of the copies' dtype.
        momentum: 0 leaves the buffers alone.
        first_run: Whether the buffers are yet to be filled.
        weight_decay_after_momentum: Whether the decay is added to the step instead of ``g``.
        scale: Gradients are multiplied by it; not written back.

    Mutates parameters, buffers and copies.
    """
    names = ("grads", "params", "momentum_buffers")
    call = checked("multi_tensor_sgd", tensor_lists, names, ("copies",))
    _check_dtypes_of_sgd(call)
    rule = SgdRule(
        lr=learning_rate,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        decays_after_momentum=bool(weight_decay_after_momentum),
    )
    grads, params, buffers, *copies = call.lists
    update = Update(
        step=1 if first_run else 2,
        inv_scale=call.factor(scale),
        found_inf=call.found_inf(noop_flag),
        halves=copies[0] if copies else None,
        halves_lead=False,
    )
    backend().update_(params, grads, buffers, rule=rule, update=update)


def _checked_adam(
    op: str, tensor_lists: TensorLists, mode: int, masters: Sequence[str] = ()
) -> Call:
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


def _adam_rule(
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mode: int,
    bias_correction: int,
) -> AdamRule:
    return AdamRule(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=BiasCorrection.MOMENTS if bias_correction else BiasCorrection.NONE,
    )


def _capturable_(
    call: Call, rule: AdamRule, step: torch.Tensor, inv_scale: torch.Tensor, noop_flag: torch.Tensor
) -> None:
    """Update, and unscale the gradients in memory as well; neither where the flag is set."""
    count, scale = call.scalar("step", step, torch.int32), call.scalar("inv_scale", inv_scale)
    found_inf = call.found_inf(noop_flag)
    grads, params, exp_avgs, exp_avg_sqs, *masters = call.lists
    update = Update(step=count, inv_scale=scale, found_inf=found_inf)
    if masters:
        update, params = replace(update, halves=params, halves_lead=False), masters[0]
    ops = backend()
    ops.update_(params, grads, exp_avgs, exp_avg_sqs, rule=rule, update=update)
    ops.scale_add_(grads, torch.where(found_inf != 0, 1.0, scale), [None] * len(grads))


def multi_tensor_adam(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: float, beta1: float, beta2: float, epsilon: float, step: int, mode: int,
    bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """One Adam or AdamW step. Does not synchronise.

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        p = p - lr * ((m / c1) / (sqrt(v / c2) + eps) + wd * p)

    Sources: Kingma and Ba, 2015; Loshchilov and Hutter, 2019.

    Args:
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``. Both moments are float32
            (float64 for float64 parameters).

    Mutates parameters and moments.
    """
    call = _checked_adam("multi_tensor_adam", tensor_lists, mode)
    call.flag(noop_flag)
    rule = _adam_rule(lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction)
    grads, params, exp_avgs, exp_avg_sqs = call.lists
    backend().update_(params, grads, exp_avgs, exp_avg_sqs, rule=rule, update=Update(step=step))


def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: torch.Tensor, beta1: float, beta2: float, epsilon: float, step: torch.Tensor, mode: int,
    bias_correction: int, weight_decay: float, inv_scale: torch.Tensor,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, with step size, step and loss scale on the device.

    Does not synchronise, so it can be captured in a CUDA graph.

    Args:
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        lr: float32, shape ``(1,)``.
        step: int32, shape ``(1,)``.
        inv_scale: float32, shape ``(1,)``; gradients are multiplied by it in place.

    Mutates gradients, parameters and moments.
    """
    call = _checked_adam("multi_tensor_adam_capturable", tensor_lists, mode)
    rate = call.scalar("lr", lr)
    rule = _adam_rule(rate, beta1, beta2, epsilon, weight_decay, mode, bias_correction)
    _capturable_(call, rule, step, inv_scale, noop_flag)


def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: torch.Tensor, beta1: float, beta2: float, epsilon: float, step: torch.Tensor, mode: int,
    bias_correction: int, weight_decay: float, inv_scale: torch.Tensor,
) -> None:  # fmt: skip
    """As `multi_tensor_adam_capturable` on float32 masters, which parameters are rounded from.

    Args:
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs, masters]``; the values of
            ``params`` are not read.

    Mutates gradients, parameters, moments and masters.
    """
    name = "multi_tensor_adam_capturable_master"
    call = _checked_adam(name, tensor_lists, mode, masters=("masters",))
    rate = call.scalar("lr", lr)
    rule = _adam_rule(rate, beta1, beta2, epsilon, weight_decay, mode, bias_correction)
    _capturable_(call, rule, step, inv_scale, noop_flag)


def multi_tensor_lamb(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: float, beta1: float, beta2: float, epsilon: float, step: int, bias_correction: int,
    weight_decay: float, grad_averaging: int, mode: int, global_grad_norm: torch.Tensor,
    max_grad_norm: float, use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """One LAMB step, which leaves the updates in the gradients. Does not synchronise.

        g = grad / max(1, |G| / max)
        m = beta1 * m + beta3 * g
        v = beta2 * v + (1 - beta2) * g²
        u = (m / c1) / (sqrt(v / c2) + eps) + wd * p
        p = p - lr * |p| / |u| * u

    The step is ``lr * u`` where either norm is 0, and wherever ``wd`` is 0 unless ``use_nvlamb``.
    Source: You et al., 2020.

    Args:
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``, each of any floating dtype.
        global_grad_norm: ``|G|``: float32, one element.
        max_grad_norm: ``max``; 0 clips nothing, where Apex would zero the gradients.
        use_nvlamb: Whether tensors without decay have a rate of their own too.

    Mutates gradients, parameters and moments.
    """
    call = checked("multi_tensor_lamb", tensor_lists, LISTS)
    call.flag(noop_flag)
    check_mode(call, mode)
    norm = call.scalar("global_grad_norm", global_grad_norm)
    grads, params, *moments = call.lists
    ops = backend()
    clip = torch.where((norm > max_grad_norm) & (max_grad_norm > 0), max_grad_norm / norm, 1.0)
    update = Update(step=step, inv_scale=clip)
    decayed: Tensors = grads
    if weight_decay and mode == 0:
        decayed = [torch.empty_like(p, dtype=math_dtype(p.dtype)) for p in params]
        ops.axpby_(decayed, clip, grads, weight_decay, params)
        update = replace(update, inv_scale=None)
    rule = LambRule(
        lr=-1.0,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        weight_decay=0.0,
        decoupled=True,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        uses_trust_ratio=False,
    )
    updates = [torch.zeros_like(p, dtype=math_dtype(p.dtype)) for p in params]
    ops.update_(updates, decayed, *moments, rule=rule, update=update)
    if weight_decay and mode == 1:
        ops.axpby_(updates, 1.0, updates, weight_decay, params)
    norms = None
    if use_nvlamb or weight_decay != 0:
        norms = stack([ops.l2norms(each, None, call.device) for each in (params, updates)])
    for grad, value in zip(grads, updates, strict=True):
        grad.copy_(value)
    _apply_(params, updates, lr, norms)


def _apply_(params: Tensors, updates: Tensors, lr: float, norms: torch.Tensor | None) -> None:
    """``p = p - lr * |p| / |u| * u``, with ``lr`` alone without norms or where one is zero."""
    rule = LarsRule(
        lr=lr,
        momentum=0.0,
        weight_decay=0.0,
        nesterov=False,
        trust_coefficient=1.0,
        eps=0.0,
        uses_trust_ratio=norms is not None,
    )
    unused = [torch.zeros_like(param, dtype=math_dtype(param.dtype)) for param in params]
    backend().update_(params, updates, unused, rule=rule, update=Update(norms=norms))
