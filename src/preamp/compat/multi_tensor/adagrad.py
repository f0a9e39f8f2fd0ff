# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_adagrad``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.arithmetic import store_, wide
from preamp.compat.multi_tensor.checks import check_mode, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradRule:
    """One Adagrad step, apart from its tensors; see `multi_tensor_adagrad`."""

    lr: float
    eps: float
    weight_decay: float
    decoupled: bool


def _adagrad_(lists: Sequence[Sequence[torch.Tensor]], rule: AdagradRule) -> None:
    """Apply ``rule`` to ``(grads, params, sums)``."""
    for grad, param, square_sum in zip(*lists, strict=True):
        g, p = wide(grad), wide(param)
        if not rule.decoupled:
            g = g + rule.weight_decay * p
        h = wide(square_sum) + g * g
        update = g / (h.sqrt() + rule.eps)
        if rule.decoupled:
            update = update + rule.weight_decay * p
        store_(square_sum, h)
        store_(param, p - rule.lr * update)


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
    rule = AdagradRule(lr=lr, eps=epsilon, weight_decay=weight_decay, decoupled=mode == 1)
    _adagrad_(call.lists, rule)
