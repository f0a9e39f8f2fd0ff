# SPDX-License-Identifier: BSD-3-Clause
"""What ops refuse of the lists that they are given, before anything is changed."""

from __future__ import annotations

from typing import cast

import torch

from preamp.core.errors import bad_value
from preamp.kernels.ops import Column, Tensors
from preamp.kernels.plans import check_lengths
from preamp.kernels.stored import Stored, scales_shape
from preamp.kernels.update import Update


def check_shapes(*columns: Column) -> None:
    """Refuse tensors of another shape than the first of their place; nothing was changed yet.

    Blocks would pair elements wrongly, and torch's fused kernels read past their ends.
    """
    for place, (param, *others) in enumerate(zip(*columns, strict=True)):
        wanted = cast("torch.Tensor", param).shape
        for other in others:
            if other is not None and other.shape != wanted:
                raise bad_value(
                    f"A gradient or state of shape {tuple(other.shape)} was given for parameter "
                    f"{place} of shape {tuple(wanted)}",
                    "Gradients and state have the shapes of their parameters",
                    "Load a checkpoint of the same model, its parameters in the same order",
                )


def check_stored(params: Tensors, update: Update) -> None:
    """Refuse lows and scales of other shapes than parameters have; nothing was changed yet."""
    stored = update.stored or Stored()
    if stored.lows is not None:
        check_shapes(params, stored.lows)
    for scales in stored.scales:
        if scales is not None:
            check_lengths(params, scales)
            shapes = [scales_shape(tensor.shape) for tensor in params]
            if [tensor.shape for tensor in scales] != shapes:
                raise bad_value(
                    f"Scales of shapes {sorted({tuple(tensor.shape) for tensor in scales})} were "
                    "given for moments in 8 bits",
                    f"Their blocks have scales of shapes {sorted(set(shapes))}",
                    "Load a checkpoint of the same model and storage",
                )
