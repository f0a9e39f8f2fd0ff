# SPDX-License-Identifier: BSD-3-Clause
"""The names of Apex's compiled module ``amp_C``.

Every list operation takes a chunk size, a no-op flag and a list of equally long lists first, by
position. The chunk size has no effect, and the flag is neither read nor set unless an operation
says so. Tensors at the same place of each list have equally many elements; those of one list share
a dtype; all are dense, contiguous or channels_last, and lie on one device with the flag. What does
not fit raises ``RuntimeError`` before anything is changed. Operations work on raw data: they record
nothing for autograd, and requiring a gradient changes nothing. None waits for the device.

In formulas ``lr`` is the step size, ``beta1`` and ``beta2`` are the decays of the moments, ``eps``
is ``epsilon`` and ``wd`` the weight decay. ``step`` counts from 1. ``c1 = 1 - beta1 ** step`` and
``c2 = 1 - beta2 ** step``, or both 1 without ``bias_correction``; ``beta3`` is ``1 - beta1`` with
``grad_averaging``, else 1. In ``mode`` 0 the decay ``wd * p`` is added to the gradient ``g`` and
not to the update.
"""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import Call, checked, raise_flag_
from preamp.compat.multi_tensor.steps import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_lamb,
    multi_tensor_sgd,
)
from preamp.kernels import backend

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

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
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite, be it because an
            input is not or because the sum of squares leaves float32's range.
        tensor_lists: ``[x]``; not mutated.
        per_tensor: Whether to return each tensor's norm as well.

    Returns:
        The norm, float32 of shape ``(1,)``, and the norms of the tensors, float32 of shape
        ``(n,)``, or ``(0,)`` unless ``per_tensor``.

    Mutates ``noop_flag``.
    """
    call = checked("multi_tensor_l2norm", tensor_lists, ("x",))
    return _chosen(_norms(call, call.flag(noop_flag), None), per_tensor)


def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None = None,
) -> Norms:
    """As `multi_tensor_l2norm`, but all norms are 0 if the flag is set already."""
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
    """``out = in * scale``; return the norms of ``in``, see `multi_tensor_l2norm`, unscaled.

    Does not synchronise.

    Args:
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite.
        tensor_lists: ``[in, out]``; ``out`` may be ``in``.
        scale: Number, or a tensor of one element.

    Mutates ``out``, also where the flag is set, and ``noop_flag``.
    """
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
    """Return the norms, see `multi_tensor_l2norm`, of ``x * inv_scale``. Does not synchronise.

    Args:
        noop_flag: int32, shape ``(1,)``; set to 1 if the norm is not finite.
        tensor_lists: ``[x]``; not mutated.
        inv_scale: float32, shape ``(1,)``: what removes the loss scale.

    Mutates ``noop_flag``.
    """
    call = checked("multi_tensor_unscale_l2norm", tensor_lists, ("x",))
    flag, factor = call.flag(noop_flag), call.scalar("inv_scale", inv_scale)
    return _chosen(_norms(call, flag, factor), per_tensor)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor | float
) -> None:
    """``out = in * scale``, rounded once. Does not synchronise.

    Args:
        noop_flag: int32, shape ``(1,)``; set to 1 if any ``in`` is not finite.
        tensor_lists: ``[in, out]``, each float16, bfloat16, float32 or float64. ``out`` may be
            ``in``.
        scale: Number, or a tensor of one element.

    Mutates ``out``, also where the flag is set, and ``noop_flag``.
    """
    call = checked("multi_tensor_scale", tensor_lists, ("in", "out"))
    flag, factor = call.flag(noop_flag), call.number("scale", scale)
    sources, targets = call.lists
    ops = backend()
    raise_flag_(flag, ops.census(sources, call.device).found_inf != 0)
    ops.axpby_(targets, factor, sources, 0.0, [None] * len(sources))


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    arg_to_check: int,
) -> None:
    """``out = a * x + b * y``, rounded once. Does not synchronise.

    Args:
        noop_flag: int32, shape ``(1,)``; set to 1 if a checked input is not finite.
        tensor_lists: ``[x, y, out]``, each float16, bfloat16, float32 or float64. ``out`` may be
            ``x`` or ``y``.
        a: Number, or a tensor of one element.
        b: As ``a``.
        arg_to_check: 0 checks ``x``, 1 checks ``y``, -1 both.

    Mutates ``out``, also where the flag is set, and ``noop_flag``.
    """
    call = checked("multi_tensor_axpby", tensor_lists, ("x", "y", "out"))
    flag, by_x, by_y = call.flag(noop_flag), call.number("a", a), call.number("b", b)
    xs, ys, targets = call.lists
    inputs = {-1: [*xs, *ys], 0: xs, 1: ys}
    if arg_to_check not in inputs:
        raise call.refuse(
            f"arg_to_check is {arg_to_check!r}",
            "0 checks x, 1 checks y, -1 both",
            "Pass -1 if unsure",
        )
    ops = backend()
    raise_flag_(flag, ops.census(inputs[arg_to_check], call.device).found_inf != 0)
    ops.axpby_(targets, by_x, xs, by_y, ys)


def update_scale_hysteresis(
    current_scale: torch.Tensor, growth_tracker: torch.Tensor, hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor, growth_factor: float, backoff_factor: float, growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:  # fmt: skip
    """Adjust a loss scale that shrinks only after several overflows. Does not synchronise.

    An overflow takes one from ``hysteresis_tracker``, and only where none is left is the scale
    multiplied by ``backoff_factor``. Every overflow starts the count of clean steps anew; a clean
    step refills the tracker, and ``growth_interval`` of them in a row multiply the scale by
    ``growth_factor``, unless the result were infinite. There is no floor.

    Args:
        current_scale: float32, shape ``(1,)``.
        growth_tracker: int32, shape ``(1,)``: clean steps in a row.
        hysteresis_tracker: int32, shape ``(1,)``: overflows still tolerated.
        found_inf: float32, shape ``(1,)``: positive after an overflow; not mutated.
        growth_factor: Above 1.
        backoff_factor: Below 1.
        growth_interval: Clean steps before the scale grows.
        hysteresis: What a clean step sets ``hysteresis_tracker`` to.

    Returns:
        ``current_scale``.

    Raises:
        RuntimeError: A tensor has another dtype, size or device.

    Mutates ``current_scale``, ``growth_tracker`` and ``hysteresis_tracker``.
    """
    call = Call("update_scale_hysteresis", (), current_scale.device)
    scale = call.scalar("current_scale", current_scale)
    clean_steps = call.scalar("growth_tracker", growth_tracker, torch.int32)
    tolerated = call.scalar("hysteresis_tracker", hysteresis_tracker, torch.int32)
    is_inf = call.scalar("found_inf", found_inf) > 0

    left = tolerated - 1
    clean = clean_steps + 1
    grown = scale * growth_factor
    is_full = clean >= growth_interval
    grows = ~is_inf & is_full & torch.isfinite(grown)
    shrinks = is_inf & (left <= 0)
    scale.copy_(torch.where(shrinks, scale * backoff_factor, torch.where(grows, grown, scale)))
    clean_steps.copy_(clean.masked_fill(is_inf | is_full, 0))
    tolerated.copy_(torch.where(is_inf, left, hysteresis))
    return current_scale
