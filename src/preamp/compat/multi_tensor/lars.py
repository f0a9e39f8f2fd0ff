# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_lars`` of ROCm's Apex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import store_, wide
from preamp.compat.multi_tensor.checks import checked


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsRule:
    """One LARS step, apart from its tensors; see `multi_tensor_lars`."""

    lr: float
    trust_coefficient: float
    eps: float
    weight_decay: float
    momentum: float
    nesterov: bool
    is_adaptive: bool
    skip: torch.Tensor


def _rates(grad_norms: torch.Tensor, param_norms: torch.Tensor, rule: LarsRule) -> torch.Tensor:
    """The step size of each tensor."""
    rates = torch.full_like(param_norms, rule.lr)
    if not rule.is_adaptive:
        return rates
    ratios = rule.trust_coefficient * param_norms
    ratios = ratios / (grad_norms + rule.weight_decay * param_norms + rule.eps)
    return torch.where((grad_norms > 0) & (param_norms > 0), rule.lr * ratios, rates)


def _lars_(
    lists: Sequence[Sequence[torch.Tensor]],
    norms: tuple[torch.Tensor, torch.Tensor],
    rule: LarsRule,
    copies: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Apply ``rule`` to ``(grads, params, momentum_buffers)`` with their grad and param norms."""
    copies = copies or [None] * len(lists[0])
    rates = _rates(*norms, rule).unbind()
    for grad, param, buffer, rate, copy in zip(*lists, rates, copies, strict=True):
        p = wide(param)
        g = rate * (wide(grad) + rule.weight_decay * p)
        m = rule.momentum * wide(buffer) - g
        p = p + (rule.momentum * m - g if rule.nesterov else m)
        store_(buffer, m, rule.skip)
        store_(param, p, rule.skip)
        if copy is not None:
            store_(copy, param, rule.skip)


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
    norms = call.vector("grad_norms", grad_norms), call.vector("param_norms", param_norms)
    rule = LarsRule(
        lr=lr,
        trust_coefficient=trust_coefficient,
        eps=epsilon,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=bool(nesterov),
        is_adaptive=not is_skipped,
        skip=call.flag(noop_flag) != 0,
    )
    _lars_(call.lists[:3], norms, rule, *call.lists[3:])
