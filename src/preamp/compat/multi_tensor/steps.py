# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer steps of ``amp_C``.

Apex's LAMB leaves the updates in the gradients, or in a list of their own. So they are made first,
as what a step of size -1 from zero arrives at, and then applied by a step of LARS without momentum:
that is, with a rate for each tensor.

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
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    SgdRule,
)
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
    )
    backend().update_(params, grads, buffers, rule=rule, update=update)


def multi_tensor_lars(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    grad_norms: torch.Tensor, param_norms: torch.Tensor, lr: float, trust_coefficient: float,
    epsilon: float, weight_decay: float, momentum: float, dampening: float, nesterov: bool,
    first_run: bool, weight_decay_after_momentum: bool, scale: float, is_skipped: bool,
) -> None:  # fmt: skip
    """One LARS step. Does not synchronise.

        s = lr * tc * |p| / (|g| + wd * |p| + eps)
        u = s * (g + wd * p)
        m = momentum * m - u
        p = p + m

    ``s`` is ``lr`` if either norm is 0. With ``nesterov`` the step is ``momentum * m - u``, with
    the new ``m``. The step size is part of the buffer. Source: You et al., 2017.

    Args:
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, momentum_buffers]``, each of any floating dtype, and
            optionally ``copies`` that receive the rounded parameters.
        grad_norms: float32, one for each tensor: norms of the gradients as they are.
        param_norms: float32, one for each tensor.
        is_skipped: Whether these tensors take plain steps of size ``lr``.

    As in Apex ``dampening``, ``first_run``, ``weight_decay_after_momentum`` and ``scale`` have no
    effect.

    Mutates parameters, buffers and copies.
    """
    names = ("grads", "params", "momentum_buffers")
    call = checked("multi_tensor_lars", tensor_lists, names, ("copies",))
    norms = [call.vector("param_norms", param_norms), call.vector("grad_norms", grad_norms)]
    rule = LarsRule(
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        trust_coefficient=trust_coefficient,
        eps=epsilon,
        uses_trust_ratio=not is_skipped,
    )
    grads, params, buffers, *copies = call.lists
    update = Update(
        found_inf=call.found_inf(noop_flag),
        halves=copies[0] if copies else None,
        norms=stack(norms),
    )
    backend().update_(params, grads, buffers, rule=rule, update=update)


def multi_tensor_adagrad(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: float, epsilon: float, mode: int, weight_decay: float,
) -> None:  # fmt: skip
    """One Adagrad step. Does not synchronise.

        h = h + g²
        p = p - lr * (g / (sqrt(h) + eps) + wd * p)

    Source: Duchi et al., 2011.

    Args:
        tensor_lists: ``[grads, params, sums]``, each of any floating dtype.

    Mutates parameters and sums.
    """
    call = checked("multi_tensor_adagrad", tensor_lists, ("grads", "params", "sums"))
    call.flag(noop_flag)
    check_mode(call, mode)
    grads, params, sums = call.lists
    rule = AdagradRule(lr=lr, eps=epsilon, weight_decay=weight_decay, decoupled=mode == 1)
    backend().update_(params, grads, sums, rule=rule, update=Update())


def multi_tensor_novograd(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    grad_norms: torch.Tensor, lr: float, beta1: float, beta2: float, epsilon: float, step: int,
    bias_correction: int, weight_decay: float, grad_averaging: int, moment_mode: int,
    norm_type: int,
) -> None:  # fmt: skip
    """One NovoGrad step. Does not synchronise.

    With the norm ``n`` of each gradient,

        v = sqrt(beta2 * v² + (1 - beta2) * n²)    for the L2 norm
        v = beta2 * v + (1 - beta2) * n            for the largest magnitude
        d = v / sqrt(c2) + eps

    and then, in mode 0,

        m = beta1 * m + beta3 * (g / d + wd * p)
        p = p - lr * m / c1

    or, in mode 1,

        m = beta1 * m + beta3 * g
        p = p - lr * ((m / c1) / d + wd * p)

    Source: Ginsburg et al., 2019.

    Args:
        tensor_lists: ``[grads, params, exp_avgs]``, each of any floating dtype.
        grad_norms: ``v``: float32, one running norm (not its square) for each tensor, whose sign
            does not matter. What it holds before the first step is the caller's choice.
        moment_mode: 0 normalises and decays inside the moment, 1 outside.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.

    Mutates parameters, moments and ``grad_norms``.
    """
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
    rule = NovoGradRule(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        weight_decay=weight_decay,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        decays_inside_moment=moment_mode == 0,
        uses_max_norm=norm_type == 0,
    )
    grads, params, exp_avgs = call.lists
    norms = call.vector("grad_norms", grad_norms).abs_().unbind()  # negative: none yet
    backend().update_(params, grads, exp_avgs, norms, rule=rule, update=Update(step=step))


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
        update, params = replace(update, halves=params), masters[0]
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


def _lamb_rule(
    beta1: float, beta2: float, eps: float, bias_correction: int = 1, grad_averaging: int = 1
) -> LambRule:
    """The rule that leaves the direction of a step where there was zero."""
    return LambRule(
        lr=-1.0,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=0.0,
        decoupled=True,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        uses_trust_ratio=False,
    )


def _clip_factor(norm: torch.Tensor, largest: Scalar) -> torch.Tensor:
    """``largest / norm`` where the norm is larger, else 1; a ``largest`` of 0 clips nothing."""
    return torch.where((norm > largest) & (largest > 0), largest / norm, 1.0)


def _directions(lists: Sequence[Tensors], rule: LambRule, update: Update) -> list[torch.Tensor]:
    """Advance the moments; return the updates without decay, in the dtype of the arithmetic."""
    grads, params, exp_avgs, exp_avg_sqs = lists
    found = [torch.zeros_like(param, dtype=math_dtype(param.dtype)) for param in params]
    backend().update_(found, grads, exp_avgs, exp_avg_sqs, rule=rule, update=update)
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
    backend().update_(params, updates, unused, rule=rule, update=update)


def _lamb_(
    call: Call,
    rule: LambRule,
    update: Update,
    lr: Scalar,
    weight: float,
    mode: int,
    use_nvlamb: bool | None,
) -> None:
    """Update ``(grads, params, exp_avgs, exp_avg_sqs)``; the updates go to the gradients.

    Tensors have a rate of their own where there is weight decay, or with ``use_nvlamb``.
    """
    grads, params, *moments = call.lists[:4]
    ops = backend()
    told = replace(update, halves=None)
    decayed: Tensors = grads
    if weight and mode == 0:
        factor = 1.0 if update.inv_scale is None else update.inv_scale
        decayed = [torch.empty_like(p, dtype=math_dtype(p.dtype)) for p in params]
        ops.axpby_(decayed, factor, grads, weight, params)
        told = replace(told, inv_scale=None)
    updates = _directions((decayed, params, *moments), rule, told)
    if weight and mode == 1:
        ops.axpby_(updates, 1.0, updates, weight, params)
    norms = None
    if use_nvlamb or weight != 0:
        device = params[0].device
        norms = stack([ops.l2norms(params, None, device), ops.l2norms(updates, None, device)])
    for grad, value in zip(grads, updates, strict=True):
        if update.found_inf is None:
            grad.copy_(value)
        else:
            grad.copy_(torch.where(update.found_inf != 0, grad, value))
    _apply_(params, updates, lr, replace(update, inv_scale=None, norms=norms))


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
    rule = _lamb_rule(beta1, beta2, epsilon, bias_correction, grad_averaging)
    update = Update(step=step, inv_scale=_clip_factor(norm, max_grad_norm))
    _lamb_(call, rule, update, lr, weight_decay, mode, use_nvlamb)


def multi_tensor_lamb_mp(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    lr: torch.Tensor, beta1: float, beta2: float, epsilon: float, step: torch.Tensor,
    bias_correction: int, weight_decay: float, grad_averaging: int, mode: int,
    global_grad_norm: torch.Tensor, max_grad_norm: torch.Tensor, use_nvlamb: bool | None,
    found_inf: torch.Tensor, inv_scale: torch.Tensor,
) -> None:  # fmt: skip
    """As `multi_tensor_lamb` on scaled gradients, with all that varies on the device.

    Does not synchronise, so it can be captured in a CUDA graph.

    Args:
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``, and optionally ``copies`` that
            receive the rounded parameters.
        lr: float32, shape ``(1,)``.
        step: int32, shape ``(1,)``.
        global_grad_norm: float32, shape ``(1,)``: norm of the scaled gradients.
        max_grad_norm: float32, shape ``(1,)``: times the loss scale as well; 0 clips nothing.
        found_inf: float32, shape ``(1,)``; nothing is changed where it is not 0.
        inv_scale: float32, shape ``(1,)``: what removes the loss scale.

    Mutates gradients, parameters, moments and copies.
    """
    call = checked("multi_tensor_lamb_mp", tensor_lists, LISTS, ("copies",))
    check_mode(call, mode)
    count = call.scalar("step", step, torch.int32)
    norm = call.scalar("global_grad_norm", global_grad_norm)
    largest = call.scalar("max_grad_norm", max_grad_norm)
    found_inf = call.found_inf(noop_flag) + call.scalar("found_inf", found_inf).abs()
    rule = _lamb_rule(beta1, beta2, epsilon, bias_correction, grad_averaging)
    factor = _clip_factor(norm, largest) * call.scalar("inv_scale", inv_scale)
    copies = call.lists[4] if len(call.lists) == 5 else None
    update = Update(step=count, inv_scale=factor, found_inf=found_inf, halves=copies)
    _lamb_(call, rule, update, call.scalar("lr", lr), weight_decay, mode, use_nvlamb)


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    per_tensor_decay: torch.Tensor, step: int, beta1: float, beta2: float, epsilon: float,
    global_grad_norm: torch.Tensor | float, max_global_grad_norm: float,
) -> None:  # fmt: skip
    """Write LAMB's updates; see `multi_tensor_lamb` for the formula. Does not synchronise.

    Decay is decoupled, gradients are averaged, and moments are corrected with the exponent
    ``step + 1``.

    Args:
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs, updates]``, each of any floating
            dtype.
        per_tensor_decay: float32, one weight decay for each tensor.
        step: Counts from 0.
        global_grad_norm: Number, or a tensor of one element on the CPU, where Apex wants it, or
            on the tensors' device.
        max_global_grad_norm: Larger norms are clipped to it; 0 clips nothing, where Apex would
            zero the gradients.

    Mutates moments and updates.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")
    call = checked("multi_tensor_lamb_stage1_cuda", tensor_lists, names)
    call.flag(noop_flag)
    decays = call.vector("per_tensor_decay", per_tensor_decay).unbind()
    given = call.number("global_grad_norm", global_grad_norm)
    if not isinstance(given, torch.Tensor):  # a scalar on the host goes with tensors anywhere
        given = torch.tensor(given, dtype=torch.float32, device="cpu")
    rule = _lamb_rule(beta1, beta2, epsilon)
    factor = _clip_factor(given.to(torch.float32), max_global_grad_norm)
    *lists, targets = call.lists
    directions = _directions(lists, rule, Update(step=step + 1, inv_scale=factor))
    ops = backend()
    for target, direction, decay, param in zip(targets, directions, decays, lists[1], strict=True):
        ops.axpby_([target], 1.0, [direction], decay, [param])


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists,
    per_tensor_param_norm: torch.Tensor, per_tensor_update_norm: torch.Tensor, lr: float,
    weight_decay: float, use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """``p = p - lr * |p| / |u| * u``. Does not synchronise.

    The rate is ``lr`` where either norm is 0, and wherever the decay is 0 unless ``use_nvlamb``.

    Args:
        tensor_lists: ``[params, updates]``, each of any floating dtype.
        per_tensor_param_norm: ``|p|``: float32, one for each tensor.
        per_tensor_update_norm: ``|u|``: float32, one for each tensor.
        weight_decay: Only whether it is 0 matters.
        use_nvlamb: Whether tensors without decay have a rate of their own too.

    Mutates parameters.
    """
    call = checked("multi_tensor_lamb_stage2_cuda", tensor_lists, ("params", "updates"))
    call.flag(noop_flag)
    param_norms = call.vector("per_tensor_param_norm", per_tensor_param_norm)
    update_norms = call.vector("per_tensor_update_norm", per_tensor_update_norm)
    params, updates = call.lists
    norms = stack([param_norms, update_norms]) if use_nvlamb or weight_decay != 0 else None
    _apply_(params, updates, lr, Update(norms=norms))
