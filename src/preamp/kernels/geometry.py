# SPDX-License-Identifier: BSD-3-Clause
"""What the tensors of several lists have in common, found without Python for each of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.errors import bad_value
from preamp.core.tensors import dtype_of, layout_of
from preamp.kernels.ops import Tensors

Column = Sequence["torch.Tensor | None"]
"""One list of an op: parameters, gradients, moments … ``None`` where a place has no such tensor."""

_torch: Any = torch
_is_contiguous = torch.Tensor.is_contiguous


def shapes_of(column: Column) -> tuple[torch.Size, ...]:
    """The shapes of tensors, as `plan_of` takes them."""
    return tuple([tensor.shape for tensor in cast("Tensors", column)])


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is the same of lists whose tensors are all contiguous and of their places' shapes."""

    shapes: tuple[torch.Size, ...]  # of each place
    dtypes: tuple[set[torch.dtype], ...]  # of each list
    leaders: tuple[torch.dtype, ...]  # the dtype of each tensor of the first list, or one for all
    is_memory: bool  # whether all lie in the memory of a CPU, where it can be read and written


class _Known:
    """Lists that were looked at before; from the second time on with torch's guards on them.

    The guards, which compilers use, compare what each tensor is *now* with what one in its place
    was: type, dtype, device, sizes and strides, in a tenth of the time that Python takes. They keep
    no tensor alive.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Remember, without guards."""
        self.geometry = geometry
        self._guards: Any = None

    def is_of(self, columns: Sequence[Column]) -> bool:
        """Whether the guards find everything as it was."""
        if self._guards is None:
            return False
        return self._guards.check(*itertools.chain.from_iterable(columns))

    @property
    def is_guarded(self) -> bool:
        """Whether there are guards."""
        return self._guards is not None

    def guard(self, columns: Sequence[Column]) -> None:
        """Make guards; where this version of torch has none, lists are looked at in Python."""
        kind = getattr(getattr(_torch._C._dynamo, "guards", None), "TensorGuards", None)
        if kind is None:
            return
        tensors = cast("list[torch.Tensor]", list(itertools.chain.from_iterable(columns)))
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        with contextlib.suppress(TypeError):
            self._guards = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


_MOST_KNOWN = 64
_MOST_ALIKE = 4  # models of the same shapes, whose tensors differ in what guards look at
_known: dict[tuple[Any, ...], list[_Known]] = {}


def geometry_of(*columns: Column) -> Geometry | None:
    """What lists have in common; ``None`` unless all tensors are there, plain, and contiguous."""
    leaders = cast("Tensors", columns[0])
    if not leaders or len(set(map(len, columns))) > 1:
        return None
    key = (len(leaders), len(columns), leaders[0].shape, leaders[-1].shape)
    alike = _known.setdefault(key, [])
    for known in alike:
        if known.is_of(columns):
            return known.geometry
    if any(type(None) in set(map(type, column)) for column in columns):
        return None
    shapes = shapes_of(leaders)
    if not all(shapes_of(column) == shapes for column in columns[1:]):
        return None
    if not all(map(are_contiguous, columns)):
        return None
    kinds = tuple(map(dtype_of, leaders))
    dtypes = tuple(set(map(dtype_of, column)) for column in columns)
    is_memory = all(all(map(lies_in_memory, column)) for column in columns)
    geometry = Geometry(shapes, dtypes, kinds[:1] if len(dtypes[0]) == 1 else kinds, is_memory)
    for known in alike:
        if not known.is_guarded and known.geometry == geometry:
            known.guard(columns)
            return geometry
    alike[:] = [*alike[-_MOST_ALIKE + 1 :], _Known(geometry)]
    if len(_known) > _MOST_KNOWN:
        _known.pop(next(iter(_known)), None)
    return geometry


OWN_MEMORY = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that lie in memory; of others it is asked."""


def lies_in_memory(tensor: Any) -> bool:
    """Whether a CPU finds the values at ``data_ptr``.

    Not those of wrappers around other tensors, such as ``DTensor``, nor of views that negate.
    """
    if not tensor.is_cpu or tensor.is_neg():
        return False
    return type(tensor) in OWN_MEMORY or not tensor.numel() or bool(tensor.data_ptr())


def check_lengths(*columns: Sequence[Any]) -> None:
    """Refuse lists of other lengths than the first; nothing was changed yet."""
    lengths = list(map(len, columns))
    if len(set(lengths)) > 1:
        raise bad_value(
            f"Lists of {', '.join(map(str, lengths))} tensors were given",
            "All lists of a call are equally long",
            "Leave parameters without a gradient out of every list",
        )


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


def are_contiguous(column: Column) -> bool:
    """Whether the tensors that are there are all dense floats in the order of their memory."""
    if type(None) in set(map(type, column)):
        column = [tensor for tensor in column if tensor is not None]
    return are_plain(column) and all(map(_is_contiguous, cast("Tensors", column)))


def are_plain(tensors: Column) -> bool:
    """Whether they are dense tensors of floating point."""
    layouts, dtypes = set(map(layout_of, tensors)), set(map(dtype_of, tensors))
    return layouts <= {torch.strided} and all(dtype.is_floating_point for dtype in dtypes)
