# SPDX-License-Identifier: BSD-3-Clause
"""Things torch knows of a tensor and has no public function for."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from preamp.core.torch_private.subclasses import unhooked

# The descriptor itself, reached through Any because torch's type stubs show only its value.
_GRAD_SLOT = cast("Any", torch.Tensor).grad

# A step asks these several times for each tensor, so they are the bare functions of the runtime,
# which cost half as much as functions around them.

stored_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD_SLOT.__get__
"""The gradient that lies in a parameter itself, whatever a subclass shows as ``grad``."""

store_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD_SLOT.__set__
"""Set the gradient in a parameter itself, past a subclass's ``grad`` property."""

# Faster still: no object is made for the call.
grad_of: Callable[[Any], torch.Tensor | None] = attrgetter("grad")
dtype_of: Callable[[Any], torch.dtype] = attrgetter("dtype")
device_of: Callable[[Any], torch.device] = attrgetter("device")
layout_of: Callable[[Any], torch.layout] = attrgetter("layout")
_own_version: Callable[[Any], int] = attrgetter("_version")
_device_number: Callable[[Any], int] = torch.Tensor.get_device


def kinds_of(kind: Callable[[Any], Any], tensors: Sequence[torch.Tensor | None]) -> set[Any]:
    """Their dtypes, devices or layouts, whichever `dtype_of` and its like return."""
    try:
        return set(map(kind, tensors))
    except AttributeError:  # there is a None
        return {kind(tensor) for tensor in tensors if tensor is not None}


def with_gradients(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those of ``params`` that have a gradient, and these; without a call for each if all have."""
    params = list(params)
    grads = list(map(grad_of, params))
    if type(None) not in set(map(type, grads)):
        return params, grads
    pairs = [pair for pair in zip(params, grads, strict=True) if pair[1] is not None]
    return [param for param, _ in pairs], [grad for _, grad in pairs]


def devices_of(tensors: Sequence[torch.Tensor | None]) -> set[torch.device]:
    """The devices of those that are not ``None``.

    A process has one kind of accelerators, so that numbers tell its devices apart, at half the
    price of asking for them. What has no number may lie in the host's memory, or on ``meta``.
    """
    try:
        numbers = set(map(_device_number, tensors))
    except TypeError:  # there is a None
        return kinds_of(device_of, tensors)
    is_one = len(numbers) == 1 and -1 not in numbers
    return kinds_of(device_of, tensors[:1] if is_one else tensors)


def are_same(some: Collection[object], others: Collection[object]) -> bool:
    """Whether two lists, or keys of dicts, are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


_DTENSOR = "torch.distributed.tensor"
_modules = sys.modules


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor (``DTensor``), not copied; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    local: Any = cast("Any", tensor)._local_tensor  # noqa: SLF001
    # What a collective still under way brings.
    return local.wait() if hasattr(local, "wait") else local


def locals_of(tensors: Sequence[Any]) -> Sequence[Any]:
    """This rank's parts; ``tensors`` itself if it has no sharded one. ``None`` stays."""
    if not has_sharded(tensors):
        return tensors
    return [None if tensor is None else local_of(tensor) for tensor in tensors]


def has_sharded(tensors: Iterable[Any]) -> bool:
    """Whether one of ``tensors`` is a ``DTensor``; costs nothing where nobody has loaded that."""
    return _DTENSOR in _modules and any(map(_is_sharded_kind, set(map(type, tensors))))


def is_sharded(tensor: object) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of any placements."""
    return _is_sharded_kind(type(tensor))


@functools.cache  # a step asks this several times for each tensor
def _is_sharded_kind(kind: type) -> bool:
    return hasattr(kind, "device_mesh") and hasattr(kind, "_local_tensor")


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor``, or its local part, was changed in place; not counting ``.data``."""
    own = tensor._version  # noqa: SLF001
    if _is_sharded_kind(type(tensor)):
        own += local_of(tensor)._version  # noqa: SLF001
    return own


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """`version_of` each of several tensors, -1 for ``None``; without a call for each."""
    if has_sharded(tensors):
        return [-1 if tensor is None else version_of(tensor) for tensor in tensors]
    return plain_versions(tensors)


def addresses_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Where this rank's parts lie, without those of sparse ones and ``None``."""
    own = locals_of(tensors) if has_sharded(tensors) else tensors
    try:
        with unhooked():
            return list(map(_address_of, cast("Any", own)))
    except (TypeError, RuntimeError):
        dense = [t for t in own if t is not None and t.layout is torch.strided]
        return list(map(_address_of, dense))


def plain_versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """`versions_of` tensors of which none is sharded."""
    try:
        return list(map(_own_version, tensors))
    except AttributeError:  # there is a None
        return [-1 if tensor is None else tensor._version for tensor in tensors]  # noqa: SLF001


_MADE_BY: Callable[[torch.Tensor], Node | None] = cast("Any", torch.Tensor).grad_fn.__get__


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node of autograd's graph that has made ``tensor``, or ``None``.

    Also where torch refuses to tell: of a view made under ``no_grad`` or by `unbind` and its like,
    once its base was written to. The script need not ask that, and may use such a view.
    """
    try:
        return _MADE_BY(tensor)
    except RuntimeError:
        return None


def host_reaches(tensor: torch.Tensor) -> bool:
    """Whether the host may read ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all values are finite: a bool scalar beside them. Does not synchronise."""
    is_plain = type(tensor) is torch.Tensor  # else the sum of its parts may overflow, and no part
    if is_plain and host_reaches(tensor) and not tensor.dim():
        return _FLAGS[math.isfinite(tensor.item())]  # torch takes four operations for it
    is_finite = tensor * 0 == 0 if is_plain else torch.isfinite(tensor)
    return is_finite.all() if tensor.dim() else is_finite


_FLAGS = {flag: torch.tensor(flag, device="cpu") for flag in (False, True)}


def is_capturing(device: torch.device) -> bool:
    """Whether work for ``device`` goes into a CUDA graph now instead of being done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class WeightMarks:
    """How often each of several tensors was written to, to tell later which changed since."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._has_sharded = False

    def add(self, tensor: torch.Tensor) -> None:
        """Mark one more tensor."""
        self._has_sharded |= is_sharded(tensor)
        self._versions.append(version_of(tensor))

    def is_changed(self, row: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor of one row was written to since."""
        return self._versions[row] != version_of(tensor)

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The rows whose tensor was written to since."""
        now = self._versions_now(tensors)
        if now == self._versions:
            return []
        pairs = enumerate(zip(now, self._versions, strict=True))
        return [row for row, (version, before) in pairs if version != before]

    def renew(self, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Mark the tensors of some rows as they are now."""
        if len(rows) == len(tensors):
            self._versions = self._versions_now(tensors)
            return
        for row in rows:
            self._versions[row] = version_of(tensors[row])

    def expect_change(self, row: int) -> None:
        """From now on a tensor counts as written to."""
        self._versions[row] = -2

    def advance(self, tensors: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Mark consecutive ones after an op, which has written to each equally often.

        After `expect_change` of the first they count as changed, which costs one more rounding.
        """
        before = self._versions[start:stop]
        by = self._versions_now(tensors[start : start + 1])[0] - before[0]
        self._versions[start:stop] = [version + by for version in before]

    def _versions_now(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        if self._has_sharded:
            return versions_of(tensors)
        with unhooked():
            return list(map(_own_version, tensors))


_address_of = torch.Tensor.data_ptr
_storage_at: Callable[[int], Any] = cast("Any", torch.UntypedStorage)._new_with_weak_ptr  # noqa: SLF001


def find_again(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return what finds a dense tensor's memory, as long as somebody else keeps it alive."""
    storage = StorageWeakRef(tensor.untyped_storage())
    view = tensor.storage_offset(), tensor.shape, tensor.stride()
    empty = tensor.new_empty(0)

    def find() -> torch.Tensor | None:
        if storage.expired():
            return None
        return empty.new_empty(0).set_(_storage_at(cast("Any", storage).cdata), *view)

    return find


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as a vector that shares its memory; torch raises where that cannot be."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().permute(memory_order(tensor)).view(-1)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions, from the largest stride to the smallest."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def storage_key(storage: Any) -> int:
    """A number that is a storage's own while it lives; on the meta device too."""
    return int(storage._cdata)  # noqa: SLF001
