# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a device whose values lie on the host meanwhile, and take no memory of the device.

Such a tensor keeps its identity, shape and version, and so all that is known of it. Its memory is
one element, seen in every place. Ops take the values instead (`values_in`). Whoever else computes
with the tensor, or writes to it, is refused: but for filling it with zeros, which its version
tells, and for clones and zeros like it, whose values are away too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.errors import bad_state
from preamp.core.tensors import version_of

Arrive = Callable[[], None]

_ALLOWED = {
    "_foreach_zero_",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
    "zero_",
}
"""Functions that tell no value, and what fills with zeros."""
_MAKE_ANOTHER = {"clone", "zeros_like"}
_VIEWS = {"H", "T", "data", "imag", "mH", "mT", "real"}  # attributes to read it through


@dataclass(slots=True, eq=False)
class _Values:
    """What a tensor has whose values are away."""

    values: torch.Tensor  # on the host
    version: int  # of the tensor, which may be filled in the meantime
    arrive: Arrive | None  # what waits until they have come


class _Away(torch.Tensor):
    """The class of a tensor while its values are away."""

    preamp_away: _Values

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__  # pyright: ignore[reportFunctionMemberAccess]
            is_allowed = name not in _VIEWS
        else:
            is_allowed = name in _ALLOWED
        if is_allowed:
            return cast("Any", super()).__torch_function__(func, types, args, kwargs)
        if name in _MAKE_ANOTHER and len(args) == 1 and not kwargs:
            return made_away(func(values_of(args[0])), args[0].device)
        raise bad_state(
            f"{name} was asked of a gradient that waits on the host",
            'With release_gradients=True and place="host" the values of gradients are on the host '
            "between a backward and its step; they may be dropped, or all be filled with zeros",
            "Change gradients in param.register_hook, which is called before they go, clip by "
            "preamp.clip_grad_norm_, or pass a storage without release_gradients",
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<a gradient of shape {tuple(self.shape)} that waits on the host>"


def is_away(tensor: Any) -> bool:
    """Whether the values of ``tensor`` lie on the host, and it does not."""
    return type(tensor) is _Away


def values_of(tensor: Any) -> Any:
    """The tensor on the host that has the values of ``tensor``; itself if these are not away."""
    if type(tensor) is not _Away:
        return tensor
    away = tensor.preamp_away
    if away.arrive is not None:
        away.arrive()
        away.arrive = None
    if version_of(tensor) != away.version:  # it was filled with zeros
        away.values, away.version = torch.zeros_like(away.values), version_of(tensor)
    return away.values


def values_in(column: Sequence[Any]) -> Sequence[Any]:
    """As `values_of` of each; the very list where none is away, since lists are known by it."""
    if any([type(tensor) is _Away for tensor in column]):
        return list(map(values_of, column))
    return column


def leave(tensor: torch.Tensor, values: torch.Tensor, arrive: Arrive | None = None) -> None:
    """Let ``tensor`` have its ``values`` on the host from now on, there once ``arrive`` returns."""
    one = torch.full((), torch.nan, dtype=values.dtype, device=tensor.device)
    tensor.data = one.expand(values.shape)
    cast("Any", tensor).preamp_away = _Values(values, version_of(tensor), arrive)
    tensor.__class__ = _Away


def zeros_away(like: torch.Tensor) -> torch.Tensor:
    """Negative zeros of the shape of ``like``, which take memory of neither its device nor host."""
    return made_away(torch.full((), -0.0, dtype=like.dtype).expand(like.shape), like.device)


def made_away(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of ``device`` with these ``values`` of the host."""
    found = torch.empty(0, dtype=values.dtype, device=device)
    leave(found, values)
    return found


def bring_back(tensor: torch.Tensor) -> None:
    """Move the values of ``tensor`` to where it is itself."""
    if is_away(tensor):
        values = values_of(tensor).to(tensor.device).contiguous()
        tensor.__class__ = torch.Tensor
        tensor.data = values
        del cast("Any", tensor).preamp_away
