# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_sgd``, ``_lars``, ``_adagrad`` and ``_novograd``."""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, check_mode, checked
from preamp.core.dtypes import HALF_DTYPES, dtype_name
from preamp.kernels import AdagradRule, LarsRule, NovoGradRule, SgdRule, Update, backend
from preamp.kernels.vectors import stack


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
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    learning_rate: float,
    nesterov: bool,
    first_run: bool,
    weight_decay_after_momentum: bool,
    scale: float,
) -> None:
    """One SGD step. Does not synchronise.

        g = scale * grad + wd * p
        m = momentum * m + (1 - dampening) * g
        p = p - lr * m

    On the first run ``m`` is ``g``. With ``nesterov`` the step is ``g + momentum * m``, without
    momentum ``g``. Source: Sutskever et al., 2013.

    Results are rounded once. Apex rounds the step of a float16 parameter and then the sum, which
    is off by up to half a unit in the last place of the step more.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, momentum_buffers]`` of one dtype, or the same with a
            fourth list ``copies`` of half parameters, where params and buffers are float32 and
            gradients float32 or of the copies' dtype.
        weight_decay: ``wd``.
        momentum: 0 leaves the buffers alone.
        dampening: See the formula.
        learning_rate: ``lr``.
        nesterov: Whether to look ahead.
        first_run: Whether the buffers are yet to be filled.
        weight_decay_after_momentum: Whether the decay is added to the step instead of ``g``.
        scale: Gradients are multiplied by it; not written back.

    Raises:
        RuntimeError: The lists do not fit, or are of other dtypes.

    Mutates:
        Parameters, buffers and copies.
    """
    del chunk_size
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
    backend().sgd_(params, grads, buffers, rule=rule, update=update)


def multi_tensor_lars(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    grad_norms: torch.Tensor,
    param_norms: torch.Tensor,
    lr: float,
    trust_coefficient: float,
    epsilon: float,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    weight_decay_after_momentum: bool,
    scale: float,
    is_skipped: bool,
) -> None:
    """One LARS step. Does not synchronise.

        s = lr * tc * |p| / (|g| + wd * |p| + eps)
        u = s * (g + wd * p)
        m = momentum * m - u
        p = p + m

    ``s`` is ``lr`` if either norm is 0. With ``nesterov`` the step is ``momentum * m - u``, with
    the new ``m``. The step size is part of the buffer. Source: You et al., 2017.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; nothing is changed where it is set.
        tensor_lists: ``[grads, params, momentum_buffers]``, each of any floating dtype, and
            optionally ``copies`` that receive the rounded parameters.
        grad_norms: float32, one for each tensor: norms of the gradients as they are.
        param_norms: float32, one for each tensor.
        lr: Step size.
        trust_coefficient: ``tc``.
        epsilon: See the formula.
        weight_decay: ``wd``.
        momentum: See the formula.
        dampening: Has no effect, as in Apex.
        nesterov: Whether to look ahead.
        first_run: Has no effect, as in Apex.
        weight_decay_after_momentum: Has no effect, as in Apex.
        scale: Has no effect, as in Apex.
        is_skipped: Whether these tensors take plain steps of size ``lr``.

    Raises:
        RuntimeError: An argument does not fit.

    Mutates:
        Parameters, buffers and copies.
    """
    del chunk_size, dampening, first_run, weight_decay_after_momentum, scale
    names = ("grads", "params", "momentum_buffers")
    call = checked("multi_tensor_lars", tensor_lists, names, ("copies",))
    g_norms, p_norms = (
        call.vector("grad_norms", grad_norms),
        call.vector("param_norms", param_norms),
    )
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
        norms=stack([p_norms, g_norms]),
    )
    backend().lars_(params, grads, buffers, rule=rule, update=update)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """One Adagrad step. Does not synchronise.

        h = h + g²
        p = p - lr * (g / (sqrt(h) + eps) + wd * p)

    In mode 0 the decay ``wd * p`` is added to ``g`` instead. Source: Duchi et al., 2011.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; neither read nor set.
        tensor_lists: ``[grads, params, sums]``, each of any floating dtype.
        lr: Step size.
        epsilon: Added outside the root.
        mode: 0 for L2 regularisation, 1 for decoupled decay.
        weight_decay: ``wd``.

    Raises:
        RuntimeError: The lists do not fit, or ``mode`` is unknown.

    Mutates:
        Parameters and sums.
    """
    del chunk_size
    call = checked("multi_tensor_adagrad", tensor_lists, ("grads", "params", "sums"))
    call.flag(noop_flag)
    check_mode(call, mode)
    grads, params, sums = call.lists
    rule = AdagradRule(lr=lr, eps=epsilon, weight_decay=weight_decay, decoupled=mode == 1)
    backend().adagrad_(params, grads, sums, rule=rule, update=Update())


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
        grad_norms: ``v``: float32, one running norm (not its square) for each tensor, whose sign
            does not matter. What it holds before the first step is the caller's choice.
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
    norms = (
        call.vector("grad_norms", grad_norms).abs_().unbind()
    )  # a negative one would be none yet
    backend().novograd_(params, grads, exp_avgs, norms, rule=rule, update=Update(step=step))
