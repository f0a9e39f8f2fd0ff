# SPDX-License-Identifier: BSD-3-Clause
"""Joining tensors of one dtype, and their norms.

``torch.autocast`` is kept out of joining: it would cast what is joined, and refuses float64. Forms
with ``out`` it leaves alone, and the functions behind the public names are not wrapped for O1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

_torch: Any = torch
_numel_of = torch.Tensor.numel
LONG = 1 << 12
"""Elements whose squares torch's sum on a CPU adds up with an error of a few ulps."""
_PIECE = 1 << 10
"""Elements of the pieces of a longer sum."""

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def cat(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` of vectors of one dtype and device, at least one."""
    size = sum(vector.numel() for vector in vectors)
    out = torch.empty(size, dtype=vectors[0].dtype, device=vectors[0].device)
    return _torch._C._VariableFunctions.cat(vectors, out=out)


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack`` of tensors of one shape, dtype and device, at least one."""
    first = tensors[0]
    out = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)
    return _torch._C._VariableFunctions.stack(tensors, out=out)


def norm(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """L2 norm, a scalar; zero for an empty tensor.

    On CPUs torch adds the squares of all elements one after the other, and loses a digit for every
    factor of ten in their number. So it is given pieces, at no cost, and their norms again.
    """
    if not has_long_sums(tensor.device, tensor.numel()):
        return _vector_norm(tensor, 2, dtype=dtype)
    flat = tensor.reshape(-1)
    whole = flat.numel() - flat.numel() % _PIECE
    pieces = _vector_norm(flat[:whole].view(-1, _PIECE), 2, dim=1, dtype=dtype)
    if whole < flat.numel():
        rest = _vector_norm(flat[whole:], 2, dtype=dtype)
        pieces = cat([pieces, rest.view(1)])
    return norm(pieces)


def has_long_sums(device: torch.device, numel: int) -> bool:
    """Whether torch would lose digits in the sum of so many squares."""
    return device.type == "cpu" and numel > LONG


def max_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, a scalar; zero for an empty tensor."""
    return tensor.abs().amax() if tensor.numel() else tensor.sum()


def norms_of(
    tensors: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The norm of each tensor, scalars; all tensors have one dtype and device, and none is empty.

    In one call but for tensors that it would lose digits of, see `norm`.
    """
    if (
        order != 2.0
        or not tensors
        or not has_long_sums(tensors[0].device, max(map(_numel_of, tensors)))
    ):
        return _torch._foreach_norm(tensors, order, dtype)
    short = [tensor for tensor in tensors if tensor.numel() <= LONG]
    found = iter(_torch._foreach_norm(short, order, dtype) if short else ())
    return [next(found) if t.numel() <= LONG else norm(t, dtype) for t in tensors]
