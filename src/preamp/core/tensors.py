# SPDX-License-Identifier: BSD-3-Clause
"""Things torch knows of a tensor and has no public function for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The descriptor itself, reached through Any because torch's type stubs show only its value.
_GRAD_SLOT = cast("Any", torch.Tensor).grad

# A step asks these several times for each tensor, so they are the bare functions of the runtime,
# which cost half as much as functions around them.

stored_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD_SLOT.__get__
"""The gradient that lies in a parameter itself, whatever a subclass shows as ``grad``."""

store_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD_SLOT.__set__
"""Set the gradient in a parameter itself, past a subclass's ``grad`` property."""

_DTENSOR = "torch.distributed.tensor"
_modules = sys.modules


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor (``DTensor``); any other tensor itself.

    The part shares its memory, so writing to it writes to the sharded tensor.
    """
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
    """How often ``tensor`` was changed in place; views of it count, writes by ``.data`` do not.

    Of a sharded tensor its own version and that of this rank's part, which kernels write to.
    """
    own = tensor._version  # noqa: SLF001
    if _is_sharded_kind(type(tensor)):
        own += local_of(tensor)._version  # noqa: SLF001
    return own


def host_reaches(tensor: torch.Tensor) -> bool:
    """Whether the host may read ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether work for ``device`` goes into a CUDA graph now instead of being done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class WeightMark:
    """What a tensor's memory was at some time, to tell later whether it was written to.

    The address alone does not tell: assigned twice, ``p.data`` may come to lie where it was. The
    storage is held weakly, so the mark keeps no memory alive.
    """

    __slots__ = ("_address", "_storage", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Mark ``tensor`` as it is now."""
        self._mark(tensor)

    def _mark(self, tensor: torch.Tensor) -> None:
        local = local_of(tensor)
        self._storage = StorageWeakRef(local.untyped_storage())
        self._address = local.data_ptr()
        self._version = version_of(tensor)

    def _is_same_memory(self, tensor: torch.Tensor) -> bool:
        return self._address == local_of(tensor).data_ptr() and not self._storage.expired()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was neither written to nor given other memory since."""
        return self._version == version_of(tensor) and self._is_same_memory(tensor)

    def renew(self, tensor: torch.Tensor) -> None:
        """Mark ``tensor`` as it is now."""
        if self._is_same_memory(tensor):
            self._version = version_of(tensor)
        else:
            self._mark(tensor)

    def advance(self, tensor: torch.Tensor) -> None:
        """Mark ``tensor`` after a write to the memory that it had when `is_of` was true."""
        self._version = version_of(tensor)


def storage_key(storage: Any) -> int:
    """A number that is a storage's own while it lives; on the meta device too."""
    return int(cast("Any", StorageWeakRef(storage)).cdata)
