# SPDX-License-Identifier: BSD-3-Clause
"""The ``amp_C.multi_tensor_l2norm`` family."""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, checked, raise_flag_
from preamp.kernels import backend

Norms = tuple[torch.Tensor, torch.Tensor]


def _norms(
    call: Call, flag: torch.Tensor, factor: torch.Tensor | None, skip: torch.Tensor | None = None
) -> Norms:
    """The norm of everything as one element and one norm for each tensor of the first list."""
    each = backend().l2norms(call.lists[0], factor, call.device)
    if skip is not None:
        each = each.masked_fill(skip, 0.0)
    total = backend().l2norm([each], [None], call.device).view(1)
    raise_flag_(flag, ~torch.isfinite(total[0]))
    return total, each


def _chosen(norms: Norms, per_tensor: bool | None) -> Norms:
    total, each = norms
    return total, each if per_tensor else each.new_empty(0)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None = None,
) -> Norms:
    """Return the L2 norm over all tensors, computed in float32. Does not synchronise.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite, be it because an
            input is not or because the sum of squares leaves float32's range.
        tensor_lists: ``[x]``; not mutated.
        per_tensor: Whether to return each tensor's norm as well.

    Returns:
        The norm, float32 of shape ``(1,)``, and the norms of the tensors, float32 of shape
        ``(n,)``, or ``(0,)`` unless ``per_tensor``.

    Raises:
        RuntimeError: The list or the flag does not fit.

    Mutates:
        ``noop_flag``.
    """
    del chunk_size
    call = checked("multi_tensor_l2norm", tensor_lists, ("x",))
    return _chosen(_norms(call, call.flag(noop_flag), None), per_tensor)


def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None = None,
) -> Norms:
    """As `multi_tensor_l2norm`, but all norms are 0 if the flag is set already.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite.
        tensor_lists: ``[x]``; not mutated.
        per_tensor: Whether to return each tensor's norm as well.

    Returns:
        See `multi_tensor_l2norm`.

    Raises:
        RuntimeError: The list or the flag does not fit.

    Mutates:
        ``noop_flag``.
    """
    del chunk_size
    call = checked("multi_tensor_l2norm_mp", tensor_lists, ("x",))
    flag = call.flag(noop_flag)
    return _chosen(_norms(call, flag, None, skip=flag != 0), per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    scale: torch.Tensor | float,
    per_tensor: bool | None = None,
) -> Norms:
    """``out = in * scale``; return the norms of ``in``, unscaled. Does not synchronise.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite.
        tensor_lists: ``[in, out]``; ``out`` may be ``in``.
        scale: Number, or a tensor of one element.
        per_tensor: Whether to return each tensor's norm as well.

    Returns:
        See `multi_tensor_l2norm`.

    Raises:
        RuntimeError: The lists or the flag do not fit.

    Mutates:
        ``out``, also where the flag is set, and ``noop_flag``.
    """
    del chunk_size
    call = checked("multi_tensor_l2norm_scale", tensor_lists, ("in", "out"))
    flag, factor = call.flag(noop_flag), call.number("scale", scale)
    norms = _norms(call, flag, None)
    sources, targets = call.lists
    backend().axpby_(targets, factor, sources, 0.0, [None] * len(sources))
    return _chosen(norms, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> Norms:
    """Return the norms of ``x * inv_scale`` without changing ``x``. Does not synchronise.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite.
        tensor_lists: ``[x]``; not mutated.
        inv_scale: float32, shape ``(1,)``: what removes the loss scale.
        per_tensor: Whether to return each tensor's norm as well.

    Returns:
        See `multi_tensor_l2norm`.

    Raises:
        RuntimeError: The list, the flag or the factor does not fit.

    Mutates:
        ``noop_flag``.
    """
    del chunk_size
    call = checked("multi_tensor_unscale_l2norm", tensor_lists, ("x",))
    flag, factor = call.flag(noop_flag), call.scalar("inv_scale", inv_scale)
    return _chosen(_norms(call, flag, factor), per_tensor)
