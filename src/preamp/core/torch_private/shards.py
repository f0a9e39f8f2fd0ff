# SPDX-License-Identifier: BSD-3-Clause
"""Sharded tensors (``DTensor``) where torch has no public way to do something to one.

``torch.distributed.tensor`` is not imported: whoever has such a tensor has loaded it, and every
class is reached through a tensor of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from preamp.core.tensors import has_sharded, is_sharded, local_of

T = TypeVar("T", bound=torch.Tensor)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` of equal shape, placements and dtype; torch does half if sharded."""
    tensor.data = value
    if is_sharded(tensor):
        sharded, given = cast("Any", tensor), cast("Any", value)
        sharded._local_tensor = given._local_tensor
        sharded._spec = given._spec


@torch.no_grad()
def sharded_as(
    local: torch.Tensor, like: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Return ``local``, not copied, as this rank's part of a tensor that is like ``like``.

    One of another ``shape`` has its rows where ``like`` has them. ``local`` may be on another
    device than ``like``, and stays there.
    """
    if not is_sharded(like):
        return local
    kind, whole = cast("Any", type(like)), cast("Any", like)
    size = whole.shape if shape is None else torch.Size(shape)
    is_alike = size == whole.shape
    is_apart = local.device.type != whole.device_mesh.device_type
    made = kind.from_local(
        local.to("meta") if is_apart else local,  # which would be moved
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=size,
        stride=whole.stride() if is_alike else torch.empty(size, device="meta").stride(),
    )
    if not is_apart:
        return made
    kind = cast("Any", type(made))
    return kind.__new__(kind, local, made._spec, requires_grad=False)


def instance_of(cls: type[T], data: torch.Tensor, *, requires_grad: bool) -> T:
    """Return sharded ``data`` as a parameter of ``cls``; ``Parameter`` keeps its own class."""
    base = next(kind for kind in type(data).__mro__ if "_local_tensor" in vars(kind))
    make, spec = cast("Any", base).__new__, cast("Any", data)._spec
    param = make(cls, local_of(data).detach(), spec, requires_grad=requires_grad)
    param._is_param = True
    return param


def without_local(refuse: Callable[[Any], object]) -> dict[str, Any]:
    """Attributes of a class of sharded tensors that have no part on any rank: ``refuse`` raises.

    Methods of a ``DTensor`` take this rank's part as an attribute, past ``__torch_function__``.
    """
    return {"_local_tensor": property(refuse)}


def place_gradients(params: Sequence[torch.Tensor]) -> None:
    """Place ``grad`` as its parameter is; communicates only for sums yet to be added up."""
    if not has_sharded(params):
        return
    for param in params:
        grad = cast("Any", param.grad)
        if grad is None or not (is_sharded(grad) and is_sharded(param)):
            continue
        wanted = cast("Any", param).placements
        if grad.placements != wanted:
            param.grad = grad.redistribute(placements=wanted)


def box_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part begins in the whole tensor, and its shape; vague if it is empty."""
    (chunk,) = cast("Any", tensor).__create_chunk_list__()
    return tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether every rank's part of a sharded tensor is consecutive rows of it, or all of them."""
    return all(
        placement.is_replicate() or (type(placement).__name__ == "Shard" and placement.dim == 0)
        for placement in cast("Any", tensor).placements
    )
