# SPDX-License-Identifier: BSD-3-Clause
"""Things torch knows of a tensor and has no public function for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The descriptor itself, reached through Any because torch's type stubs show only its value.
_GRAD_SLOT = cast("Any", torch.Tensor).grad

# A step asks these several times for each tensor, so they are the bare functions of the runtime,
# which cost half as much as functions around them.

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was changed in place; views of it count, writes by ``.data`` do not."""

stored_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD_SLOT.__get__
"""The gradient that lies in a parameter itself, whatever a subclass shows as ``grad``."""

store_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD_SLOT.__set__
"""Set the gradient in a parameter itself, past a subclass's ``grad`` property."""


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
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._address = tensor.data_ptr()
        self._version = version_of(tensor)

    def _is_same_memory(self, tensor: torch.Tensor) -> bool:
        return self._address == tensor.data_ptr() and not self._storage.expired()

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
