# SPDX-License-Identifier: BSD-3-Clause
"""What ops refuse of the lists that they are given, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import bad_value
from preamp.core.tensors import dtype_of
from preamp.kernels.ops import Column, Tensors
from preamp.kernels.plans import check_lengths
from preamp.kernels.stored import Format, scales_shape
from preamp.kernels.update import Update


def check_shapes(*columns: Column) -> tuple[torch.Size, ...]:
    """Refuse tensors of another shape than the first of their place, and return the shapes.

    Nothing was changed yet. Blocks would pair elements wrongly, and torch's fused kernels read past
    their ends.
    """
    shapes = [tensor.shape for tensor in cast("Tensors", columns[0])]
    for column in columns[1:]:
        found = [None if tensor is None else tensor.shape for tensor in column]
        if found == shapes:
            continue
        for place, (wanted, got) in enumerate(zip(shapes, found, strict=True)):
            if got is not None and got != wanted:
                raise bad_value(
                    f"A gradient or state of shape {tuple(got)} was given for parameter "
                    f"{place} of shape {tuple(wanted)}",
                    "Gradients and state have the shapes of their parameters",
                    "Load a checkpoint of the same model, its parameters in the same order",
                )
    return tuple(shapes)


def check_stored(params: Tensors, state: Sequence[Tensors], update: Update) -> None:
    """Refuse what does not fit together in ``update.stored``; nothing was changed yet."""
    stored = update.stored
    if stored is None or not params:
        return
    shapes, kinds = _shapes_of(params), set(map(dtype_of, params))
    if torch.float64 in kinds:
        raise _does_not_fit("float64 parameters", "Masters and moments of float32")
    if stored.lows is not None:
        if update.halves is not None or not kinds <= set(HALF_DTYPES):
            raise _does_not_fit(
                f"lows beside {'halves' if update.halves is not None else f'{kinds} parameters'}",
                "Half parameters with an int16 tensor each, and no other halves,",
            )
        _check_column("lows", stored.lows, shapes, torch.int16)
    if not stored.formats:
        return
    if len(stored.formats) != len(state):
        raise _does_not_fit(
            f"{len(stored.formats)} formats for {len(state)} lists of state", "One for each list"
        )
    if set(stored.formats) != {Format.PLAIN}:
        check_lengths(params, stored.numbers, stored.starts)
    for row, (kind, column) in enumerate(zip(stored.formats, state, strict=True)):
        if kind.dtype is not None:
            _check_column(kind.value, column, shapes, kind.dtype)
        if kind.has_scales:
            scales = stored.scales[row] if row < len(stored.scales) else None
            if scales is None or not all(shapes):
                raise _does_not_fit(
                    f"{kind.value} tensors without scales or dimensions",
                    "Tensors of rows, and of each one of scales,",
                )
            _check_column("scales", scales, tuple(map(scales_shape, shapes)), torch.float32)


def _check_column(
    name: str, column: Tensors, shapes: tuple[Sequence[int], ...], dtype: torch.dtype
) -> None:
    check_lengths(shapes, column)
    if set(map(dtype_of, column)) != {dtype} or _shapes_of(column) != shapes:
        found = sorted({f"{tuple(t.shape)} of {t.dtype}" for t in column})
        wanted = sorted({f"{tuple(shape)}" for shape in shapes})
        raise _does_not_fit(
            f"{name} of {', '.join(found)}", f"Tensors of {', '.join(wanted)} of {dtype}"
        )


def _does_not_fit(got: str, wanted: str) -> ValueError:
    return bad_value(
        f"An update of stored lists got {got}",
        f"{wanted} are what it takes",
        "Load a checkpoint of the same model and storage",
    )


def _shapes_of(column: Column) -> tuple[torch.Size, ...]:
    return tuple([tensor.shape for tensor in cast("Tensors", column)])
