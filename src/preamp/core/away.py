# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a device whose values lie on the host meanwhile, and take no memory of the device.

Such a tensor keeps its identity, shape and version, and so all that is known of it. Its memory is
one element, which is nan, seen in every place. Ops take the values instead (`values_in`). Whoever
reads the tensor by itself finds nan; torch refuses to write to it, but for filling it with zeros,
which its version tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from preamp.core.tensors import version_of

_NAME: Final = "preamp_away"


@dataclass(slots=True, eq=False)
class _Away:
    """What a tensor has whose values are away."""

    values: torch.Tensor  # on the host
    version: int  # of the tensor, which may be filled in the meantime


def is_away(tensor: Any) -> bool:
    """Whether the values of ``tensor`` lie on the host, and it does not."""
    return hasattr(tensor, _NAME)


def values_of(tensor: Any) -> Any:
    """The tensor on the host that has the values of ``tensor``; itself if these are not away."""
    away: _Away | None = getattr(tensor, _NAME, None)
    if away is None:
        return tensor
    if version_of(tensor) != away.version:
        away.values, away.version = _on_host(tensor), version_of(tensor)
    return away.values


def values_in(column: Sequence[Any]) -> Sequence[Any]:
    """As `values_of` of each; the very list where none is away, since lists are known by it."""
    if any([hasattr(tensor, _NAME) for tensor in column]):
        return list(map(values_of, column))
    return column


def send_away(tensor: torch.Tensor) -> None:
    """Move the values of ``tensor`` to the host; waits for the device."""
    _leave(tensor, _on_host(tensor), torch.nan)


def zeros_away(like: torch.Tensor) -> torch.Tensor:
    """Negative zeros of the shape of ``like``, which take no memory of its device nor the host."""
    found = torch.empty(0, dtype=like.dtype, device=like.device)
    _leave(found, torch.full((1,), -0.0, dtype=like.dtype).expand(like.shape), -0.0)
    return found


def bring_back(tensor: torch.Tensor) -> None:
    """Move the values of ``tensor`` to where it is itself."""
    if is_away(tensor):
        tensor.data = values_of(tensor).to(tensor.device).contiguous()
        delattr(tensor, _NAME)


def _leave(tensor: torch.Tensor, values: torch.Tensor, shown: float) -> None:
    one = torch.full((1,), shown, dtype=values.dtype, device=tensor.device)
    tensor.data = one.expand(values.shape)
    setattr(tensor, _NAME, _Away(values, version_of(tensor)))


@torch.no_grad()
def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor)
