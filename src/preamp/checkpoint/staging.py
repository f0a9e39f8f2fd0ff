# SPDX-License-Identifier: BSD-3-Clause
"""Tensors from CUDA devices to the host, in few large copies through pinned memory.

Copied one by one, each tensor makes the host wait and each copy is a slow one of pageable memory.
Here the bytes of many tensors lie one behind the other in chunks of at most `CHUNK`. A chunk is
packed on the stream that trains, so that whatever trains on comes after it, and it is carried away
on a stream of its own. At most `AT_ONCE` chunks have memory on the device; the device, not the
host, waits before it packs another one.

Other devices than those of CUDA have no pinned memory here: their tensors are copied one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from preamp.core.pinned import laid_as, pinned
from preamp.core.tensors import memory_order
from preamp.kernels import Ops
from preamp.optim import SplitTable, pair_of

CHUNK = 32 << 20
"""Bytes; a power of two, since torch reserves pinned memory in these."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class SplitTensor:
    """A float32 tensor, kept as a half one and an int16 beside it.

    It is joined on its device, as many elements at a time as a chunk has. See `Ops.split_`.
    """

    half: torch.Tensor
    low: torch.Tensor  # of the same shape
    ops: Ops

    @property
    def form(self) -> torch.Tensor:
        """A tensor without memory, of the same shape, strides and dtype."""
        return torch.empty_like(self.half, dtype=torch.float32, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        """The shape of all three."""
        return self.half.shape

    @property
    def device(self) -> torch.device:
        """Where it is joined; the half one may be on another device."""
        return self.low.device

    def contiguous(self) -> SplitTensor:
        """The same with elements in the usual order; not copied where they are."""
        return replace(self, half=self.half.contiguous(), low=self.low.contiguous())

    def permute(self, order: Sequence[int]) -> SplitTensor:
        """The same with dimensions in another order; a view."""
        half, low = (torch.permute(part, tuple(order)) for part in (self.half, self.low))
        return replace(self, half=half, low=low)

    def clone(self) -> torch.Tensor:
        """All of it as a float32 tensor."""
        wide = torch.empty_like(self.half, dtype=torch.float32, device=self.device)
        self.ops.join_([self.half], [self.low], [wide])
        return wide


Value = torch.Tensor | SplitTensor


def value_of(param: torch.Tensor) -> Value:
    """The value of a parameter, not copied; a split master's parts."""
    twin = pair_of(param)
    if twin is None:
        return param.detach()
    table = twin.table
    if not isinstance(table, SplitTable):
        return twin.value()
    return SplitTensor(*table.parts(twin.row), table.ops)


class _Piece(NamedTuple):
    """Some bytes of a tensor."""

    number: int  # which tensor
    start: int
    stop: int


class _Chunk(NamedTuple):
    """Bytes on their way."""

    event: torch.cuda.Event  # recorded behind the copy
    pinned: torch.Tensor
    pieces: list[_Piece]


def download(tensors: Sequence[Value], *, waits: bool) -> Callable[[], list[torch.Tensor]]:
    """Queue copies to the CPU; return what waits for them and returns them, in order.

    Results keep the order of their memory. Tensors of the CPU come back themselves. With ``waits``
    the host waits for early chunks before it queues too many: pinned memory is `AT_ONCE` times
    `CHUNK` at most. Otherwise it is as much as the tensors have, and nothing waits here. Raises
    `PreampUnavailableError` if the host has no such memory to give.
    """
    made = [_like(own, "cpu") if _is_staged(own) else _brought(own) for own in tensors]
    under_way = deque[_Chunk]()
    # What is packed lives until it was carried away, or until its stream waits for that.
    packed_on: dict[torch.device, deque[tuple[torch.cuda.Event, torch.Tensor]]] = {}

    def land() -> None:
        chunk = under_way.popleft()
        chunk.event.synchronize()
        _fill(made, chunk.pieces, chunk.pinned)

    def finish() -> list[torch.Tensor]:
        while under_way:
            land()
        packed_on.clear()
        return made

    views = _Views(tensors)
    for device, numbers in _by_device(tensors).items():
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        on_device = packed_on.setdefault(device, deque())
        for pieces in _chunks(tensors, numbers):
            if waits and len(under_way) == AT_ONCE:
                land()
            if len(on_device) == AT_ONCE:
                current.wait_event(on_device.popleft()[0])
            packed = views.joined(pieces)
            pinned = _pinned(packed.numel(), device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                pinned.copy_(packed, non_blocking=True)
                event = torch.cuda.Event()
                event.record(side)
            on_device.append((event, packed))
            under_way.append(_Chunk(event, pinned, pieces))
    return finish


def _is_staged(value: Value) -> bool:
    """Whether it is a dense tensor of a CUDA device, and no class that wraps others."""
    if value.device.type != "cuda" or isinstance(value, SplitTensor):
        return value.device.type == "cuda"
    return value.layout is torch.strided and not hasattr(value, "__tensor_flatten__")


def _brought(value: Value) -> torch.Tensor:
    return (value.clone() if isinstance(value, SplitTensor) else value).to("cpu")


def _by_device(values: Sequence[Value]) -> dict[torch.device, list[int]]:
    """The numbers of those of CUDA's devices."""
    found: dict[torch.device, list[int]] = {}
    for number, value in enumerate(values):
        if _is_staged(value):
            found.setdefault(value.device, []).append(number)
    return found


def _chunks(values: Sequence[Value], numbers: Sequence[int]) -> Iterator[list[_Piece]]:
    """Cut the bytes of tensors, one behind the other, into chunks."""
    pieces: list[_Piece] = []
    room = CHUNK
    for number in numbers:
        value = values[number]
        start, size = 0, value.shape.numel() * value.dtype.itemsize
        while start < size:
            stop = min(size, start + room)
            pieces.append(_Piece(number, start, stop))
            start, room = stop, room - (stop - start)
            if room == 0:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces


def _fill(into: Sequence[torch.Tensor], pieces: Sequence[_Piece], chunk: torch.Tensor) -> None:
    at = 0
    for number, start, stop in pieces:
        _in_order(into[number]).view(torch.uint8)[start:stop].copy_(chunk[at : at + stop - start])
        at += stop - start


class _Views:
    """Tensors as vectors; those of the latest are kept, since they are a copy if it has gaps."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values = values
        self._number = -1
        self._latest: list[torch.Tensor] = []

    def joined(self, pieces: Sequence[_Piece]) -> torch.Tensor:
        """The bytes of ``pieces``, one behind the other."""
        return torch.cat([self._bytes(*piece) for piece in pieces])

    def _bytes(self, number: int, start: int, stop: int) -> torch.Tensor:
        value = self._values[number]
        if not isinstance(value, SplitTensor):
            if number != self._number:
                self._number, self._latest = number, [_in_order(value).view(torch.uint8)]
            return self._latest[0][start:stop]
        if number != self._number:
            order = memory_order(value.form)
            both = (value.half, value.low)
            self._number, self._latest = number, [t.permute(order).reshape(-1) for t in both]
        first, last = start // 4, -(-stop // 4)
        half, low = (vector[first:last] for vector in self._latest)
        wide = torch.empty(last - first, dtype=torch.float32, device=value.device)
        value.ops.join_([half], [low], [wide])
        return wide.view(torch.uint8)[start - 4 * first : stop - 4 * first]


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a vector in the order of its memory; a view, unless there are gaps in it."""
    value = tensor.detach().resolve_conj().resolve_neg()
    return value.permute(memory_order(value)).reshape(-1)


def _like(value: Value, device: torch.device | str) -> torch.Tensor:
    """An empty tensor of the same form, whose memory is in the same order and without gaps."""
    form = value.form if isinstance(value, SplitTensor) else value
    return laid_as(form, torch.empty(form.numel(), dtype=form.dtype, device=device))


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    return pinned(
        size,
        f"copies of {device}",
        f"Checkpoints of devices need {AT_ONCE * CHUNK >> 20} MiB of it, and asynchronous "
        "saves as much as the tensors have",
        "Save with asynchronous=False, or give the process more memory that it may lock",
    )
