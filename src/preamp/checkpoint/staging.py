# SPDX-License-Identifier: BSD-3-Clause
"""Tensors between CUDA devices and the host, in few large copies through pinned memory.

Copied one by one, each tensor makes the host wait and each copy is a slow one of pageable memory.
Here the bytes of many tensors lie one behind the other in chunks of at most `CHUNK`. A chunk is
packed on the stream that trains, so that whatever trains on comes after it, and it is carried to
the host on a stream of its own. At most `AT_ONCE` chunks have memory on the device; the device,
not the host, waits before it packs another one.

Other devices than those of CUDA have no pinned memory here: their tensors are copied one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from preamp.core.pinned import laid_as, pinned
from preamp.core.tensors import memory_order

CHUNK = 32 << 20
"""Bytes; a power of two, since torch reserves pinned memory in these."""
AT_ONCE = 4


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


def download(tensors: Sequence[torch.Tensor], *, waits: bool) -> Callable[[], list[torch.Tensor]]:
    """Queue copies to the CPU; return what waits for them and returns them, in order.

    Results keep the order of their memory. Tensors of the CPU come back themselves. With ``waits``
    the host waits for early chunks before it queues too many: pinned memory is `AT_ONCE` times
    `CHUNK` at most. Otherwise it is as much as the tensors have, and nothing waits here. Raises
    `PreampUnavailableError` if the host has no such memory to give.
    """
    made = [_like(own, "cpu") if _is_staged(own) else own.to("cpu") for own in tensors]
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
            packed, pinned = _joined(views, pieces), _pinned(pieces, device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                pinned.copy_(packed, non_blocking=True)
                event = torch.cuda.Event()
                event.record(side)
            on_device.append((event, packed))
            under_way.append(_Chunk(event, pinned, pieces))
    return finish


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies of dense tensors of the CPU on a CUDA device, with the order of their memory.

    The host waits for none of the last `AT_ONCE` chunks, and has no more of pinned memory. Raises
    `PreampUnavailableError` if it has no such memory to give.
    """
    made, views = [_like(own, device) for own in tensors], _Views(tensors)
    under_way = deque[_Chunk]()
    for pieces in _chunks(tensors, range(len(tensors))):
        if len(under_way) == AT_ONCE:
            under_way.popleft().event.synchronize()
        pinned = _joined(views, pieces, out=_pinned(pieces, device))
        _fill(made, pieces, pinned.to(device, non_blocking=True))
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        under_way.append(_Chunk(event, pinned, pieces))
    return made


def _is_staged(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor of a CUDA device, and no class that wraps others."""
    is_dense = tensor.is_cuda and tensor.layout is torch.strided
    return is_dense and not hasattr(tensor, "__tensor_flatten__")


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The numbers of those of CUDA's devices."""
    found: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if _is_staged(tensor):
            found.setdefault(tensor.device, []).append(number)
    return found


def _chunks(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Iterator[list[_Piece]]:
    """Cut the bytes of tensors, one behind the other, into chunks."""
    pieces: list[_Piece] = []
    room = CHUNK
    for number in numbers:
        start, size = 0, tensors[number].numel() * tensors[number].element_size()
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
        _bytes_of(into[number])[start:stop].copy_(chunk[at : at + stop - start])
        at += stop - start


class _Views:
    """Bytes of tensors; those of the latest are kept, since they are a copy if it has gaps."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._number, self._bytes = -1, torch.empty(0, dtype=torch.uint8, device="cpu")

    def __getitem__(self, number: int) -> torch.Tensor:
        if number != self._number:
            self._number, self._bytes = number, _bytes_of(self._tensors[number])
        return self._bytes


def _joined(
    views: _Views, pieces: Sequence[_Piece], out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.cat([views[number][start:stop] for number, start, stop in pieces], out=out)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its memory; a view, unless there are gaps in it."""
    value = tensor.detach().resolve_conj().resolve_neg()
    return value.permute(memory_order(value)).reshape(-1).view(torch.uint8)


def _like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """An empty tensor of the same form, whose memory is in the same order and without gaps."""
    return laid_as(tensor, torch.empty(tensor.numel(), dtype=tensor.dtype, device=device))


def _pinned(pieces: Sequence[_Piece], device: torch.device) -> torch.Tensor:
    return pinned(
        sum(stop - start for _, start, stop in pieces),
        f"copies of {device}",
        f"Checkpoints of devices need {AT_ONCE * CHUNK >> 20} MiB of it, and asynchronous "
        "saves as much as the tensors have",
        "Save with asynchronous=False, or give the process more memory that it may lock",
    )
