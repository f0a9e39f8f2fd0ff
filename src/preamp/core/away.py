# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a device whose values lie on the host, and take no memory of the device.

Such a tensor has no memory. Ops of ours take the values (`values_in`). Every
operation of torch comes to the class: it may fill with zeros, copy, and add another tensor, which
is what autograd does with a second gradient. The others are refused, however they are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch

from preamp.core.errors import PreampStateError, bad_state
from preamp.core.torch_private.subclasses import hears_no_functions, made_like

Arrive = Callable[[], None]
_aten: Any = torch.ops.aten  # pyright: ignore[reportAttributeAccessIssue]


class _Away(torch.Tensor):
    """The class of a tensor whose values are away."""

    held: torch.Tensor  # the values: on the host, or on the device until they are sent there
    arrive: Arrive | None  # waits until they have come, if they are on their way

    __torch_function__ = hears_no_functions

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allowed = _ALLOWED.get(func)
        found = NotImplemented if allowed is None else allowed(*args, **(kwargs or {}))
        if found is NotImplemented:
            raise _refused(func.overloadpacket.__name__)
        return found

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<a gradient of shape {tuple(self.shape)} that waits on the host>"

    def _no_operation(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For what torch makes no operation of."""
        raise _refused("its memory")

    __deepcopy__ = __reduce_ex__ = __dlpack__ = numpy = tolist = __array__ = _no_operation
    data = property(_no_operation, _no_operation)  # pyright: ignore[reportAssignmentType]


def _refused(what: str) -> PreampStateError:
    return bad_state(
        f"{what} was asked of a gradient that waits on the host",
        'With release_gradients=True and place="host" the values of gradients are on the host '
        "between a backward and its step; they may be dropped, or all be filled with zeros",
        "Change gradients in param.register_hook, which is called before they go, clip by "
        "preamp.clip_grad_norm_, or pass a storage without release_gradients",
    )


def _zero(tensor: Any) -> Any:
    if not is_away(tensor):
        return tensor.zero_()
    _hold(tensor, torch.zeros_like(tensor.held, device="cpu"))
    return tensor


def _zero_all(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        _zero(tensor)


def _clone(tensor: Any) -> Any:
    return made_away(values_of(tensor).clone(), tensor)


def _zeros_like(tensor: Any, *, pin_memory: bool = False) -> Any:
    return made_away(torch.zeros_like(values_of(tensor)), tensor)


def _add_(tensor: Any, other: Any) -> Any:
    """Add on the device, where the sum stays until it is sent."""
    if not is_away(tensor) or is_away(other):
        return NotImplemented
    _hold(tensor, on_device(tensor).add_(other))
    return tensor


def _add(tensor: Any, other: Any) -> Any:
    """Add where the sum is to have a graph."""
    if not is_away(tensor) or not isinstance(other, torch.Tensor) or is_away(other):
        return NotImplemented
    return on_device(tensor) + other


_ALLOWED: Final[dict[Any, Callable[..., Any]]] = {
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero_all,
    _aten.clone.default: _clone,
    _aten.zeros_like.default: _zeros_like,
    _aten.add_.Tensor: _add_,
    _aten.add.Tensor: _add,
}


def is_away(tensor: Any) -> bool:
    """Whether the values of ``tensor`` lie on the host, and it does not."""
    return type(tensor) is _Away


def values_of(tensor: Any) -> Any:
    """The tensor on the host that has the values of ``tensor``; itself if these are not away."""
    if type(tensor) is not _Away:
        return tensor
    if tensor.arrive is not None:
        tensor.arrive()
    _hold(tensor, tensor.held.cpu())
    return tensor.held


def values_in(column: Sequence[Any]) -> Sequence[Any]:
    """As `values_of` each; the very list where none is away, since lists are known by it."""
    if any([type(tensor) is _Away for tensor in column]):
        return list(map(values_of, column))
    return column


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` where it is itself: a copy unless they are there."""
    if not isinstance(tensor, _Away):
        return tensor
    is_there = tensor.held.device == tensor.device
    return tensor.held if is_there else values_of(tensor).to(tensor.device)


def is_sent(tensor: torch.Tensor) -> bool:
    """Whether nothing of ``tensor`` is left on its device."""
    return isinstance(tensor, _Away) and tensor.held.device != tensor.device


def send_away(tensor: torch.Tensor, values: torch.Tensor, arrive: Arrive | None) -> torch.Tensor:
    """Return what has ``values`` in place of ``tensor``, itself if it is such a tensor already.

    They are there once ``arrive`` returns.
    """
    if not isinstance(tensor, _Away):
        return made_away(values, tensor, arrive)
    _hold(tensor, values, arrive)
    return tensor


def made_away(
    values: torch.Tensor, like: torch.Tensor, arrive: Arrive | None = None
) -> torch.Tensor:
    """A tensor such as ``like`` with ``values`` of the host, there once ``arrive`` returns."""
    made = made_like(_Away, like)
    _hold(made, values, arrive)
    return made


def zeros_away(like: torch.Tensor) -> torch.Tensor:
    """Negative zeros of the shape of ``like``, which take memory of neither its device nor host."""
    return made_away(torch.full((), -0.0, dtype=like.dtype).expand(like.shape), like)


def _hold(tensor: Any, values: torch.Tensor, arrive: Arrive | None = None) -> None:
    tensor.held, tensor.arrive = values, arrive
