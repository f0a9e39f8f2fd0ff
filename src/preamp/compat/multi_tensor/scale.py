# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.multi_tensor_scale`` and ``multi_tensor_axpby``."""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.compat.multi_tensor.checks import checked, raise_flag_
from preamp.kernels import backend


def multi_tensor_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    scale: torch.Tensor | float,
) -> None:
    """``out = in * scale``, rounded once. Does not synchronise.

    Args:
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if any ``in`` is not finite.
        tensor_lists: ``[in, out]``, each float16, bfloat16, float32 or float64. ``out`` may be
            ``in``.
        scale: Number, or a tensor of one element.

    Raises:
        RuntimeError: The lists or the flag do not fit.

    Mutates:
        ``out``, also where the flag is set, and ``noop_flag``.
    """
    del chunk_size
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
        chunk_size: Has no effect.
        noop_flag: int32, shape ``(1,)``; set to 1 if a checked input is not finite.
        tensor_lists: ``[x, y, out]``, each float16, bfloat16, float32 or float64. ``out`` may be
            ``x`` or ``y``.
        a: Number, or a tensor of one element.
        b: As ``a``.
        arg_to_check: 0 checks ``x``, 1 checks ``y``, -1 both.

    Raises:
        RuntimeError: The lists or the flag do not fit, or ``arg_to_check`` is another number.

    Mutates:
        ``out``, also where the flag is set, and ``noop_flag``.
    """
    del chunk_size
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
