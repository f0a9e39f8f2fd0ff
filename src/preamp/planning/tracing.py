# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that operations hold and move, counted from the operations themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from preamp.kernels.observe import ObservedOps


class Traffic:
    """While entered, counts the memory of new tensors and the bytes that operations touch.

    What a kernel allocates inside of itself is not seen. Deterministic: neither an allocator nor
    another thread has a part in it.

    Attributes:
        live: Bytes of the storages that were made since the start and still exist.
        peak: The largest value of ``live`` so far.
        moved: Bytes of all inputs and outputs of operations that are not mere views, as if each
            were read or written once.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.live = 0
        self.peak = 0
        self.moved = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._ops = ObservedOps(self._see)

    def __enter__(self) -> Traffic:
        """Begin to count."""
        self._ops.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop; storages that go later are not missed."""
        cast("Any", self._ops).__exit__(*error)

    def _see(
        self, op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        del op
        ours = {id(tensor) for tensor in inputs}
        held = {id(tensor.untyped_storage()) for tensor in inputs if _has_storage(tensor)}
        is_view = bool(outputs)
        for tensor in outputs:
            if not _has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            is_view = is_view and id(storage) in held and id(tensor) not in ours
            if id(storage) not in held:
                self._hold(storage)
        if not is_view:
            self.moved += sum(map(touched_bytes, (*inputs, *outputs)))

    def _hold(self, storage: Any) -> None:
        key, size = id(storage), int(storage.nbytes())
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def gone(_: weakref.ref[Any]) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading or writing all of ``tensor`` touches; repeated ones once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if _has_storage(tensor) else size


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
