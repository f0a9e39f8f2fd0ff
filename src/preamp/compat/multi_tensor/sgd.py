# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_sgd``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import store_, wide
from preamp.compat.multi_tensor.checks import Call, checked
from preamp.core.dtypes import HALF_DTYPES, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule:
    """One SGD step, apart from its tensors.

    Attributes:
        lr: Step size.
        momentum: 0 leaves the buffers alone.
        dampening: What a gradient loses on its way into a buffer, but for the first.
        nesterov: Whether the buffer is looked ahead.
        weight_decay: Added to the gradient.
        decay_last: Whether it is added after the momentum.
        is_first: Whether the buffers are yet to be filled.
        grad_factor: Removes the loss scale.
        skip: Scalar; nothing changes where it is true.
    """

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    decay_last: bool
    is_first: bool
    grad_factor: float
    skip: torch.Tensor


def _check_dtypes(call: Call) -> None:
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


def _sgd_(
    lists: Sequence[Sequence[torch.Tensor]],
    rule: SgdRule,
    copies: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Apply ``rule`` to ``(grads, params, momentum_buffers)`` and round params to copies."""
    copies = copies or [None] * len(lists[0])
    for grad, param, buffer, copy in zip(*lists, copies, strict=True):
        p = wide(param)
        update = wide(grad) * rule.grad_factor
        if rule.weight_decay and not rule.decay_last:
            update = update + rule.weight_decay * p
        if rule.momentum:
            m = update
            if not rule.is_first:
                m = rule.momentum * wide(buffer) + (1 - rule.dampening) * update
            update = update + rule.momentum * m if rule.nesterov else m
            store_(buffer, m, rule.skip)
        if rule.weight_decay and rule.decay_last:
            update = update + rule.weight_decay * p
        p = p - rule.lr * update
        store_(param, p, rule.skip)
        if copy is not None:
            store_(copy, param, rule.skip)


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
    _check_dtypes(call)
    rule = SgdRule(
        lr=learning_rate,
        momentum=momentum,
        dampening=dampening,
        nesterov=bool(nesterov),
        weight_decay=weight_decay,
        decay_last=bool(weight_decay_after_momentum),
        is_first=bool(first_run),
        grad_factor=scale,
        skip=call.flag(noop_flag) != 0,
    )
    _sgd_(call.lists[:3], rule, *call.lists[3:])
