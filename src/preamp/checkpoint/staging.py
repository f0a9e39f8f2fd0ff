# SPDX-License-Identifier: BSD-3-Clause
"""Tensors between CUDA devices and the host, in few large copies through pinned memory.

Copied one by one, each tensor makes the host wait and each copy is a slow one of pageable memory.
Here the bytes of many tensors lie one behind the other in chunks of at most `CHUNK`. On the way to
the host (`download`) a chunk is packed on the stream that trains, so that whatever trains on comes
after it, and it is carried away on a stream of its own. At most `AT_ONCE` chunks have memory on the
device; the device, not the host, waits before it packs another one. On the way back
(`StagedUploads`) bytes go from the chunk to where they stay.

Other devices than those of CUDA have no pinned memory here: their tensors are copied one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from preamp.core.pinned import laid_as, pinned
from preamp.core.tensors import is_sharded, local_of, memory_order
from preamp.kernels import Ops
from preamp.kernels.shards import sharded_as
from preamp.optim import pair_of

CHUNK = 32 << 20
"""Bytes; a power of two, since torch reserves pinned memory in these."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class SplitTensor:
    """A float32 tensor, or this rank's part of it, kept as a half one and an int16 beside it.

    It is joined on its device, as many elements at a time as a chunk has. See `Ops.split_`.
    """

    half: torch.Tensor  # this rank's part
    low: torch.Tensor  # of the same shape
    weight: torch.Tensor  # of which that is a part, if it is one; or sharded
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
        """The shape of this rank's part."""
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
    """The value of a parameter, not copied; of a packed master without making that."""
    twin = pair_of(param)
    parts = None if twin is None else twin.packed()
    if twin is None or parts is None:
        return param.detach()
    return SplitTensor(*parts, twin.half.detach(), twin.table.ops)


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


class StagedUploads(TorchFunctionMode):
    """While it is on, copies of dense tensors of the CPU to CUDA devices go through pinned memory.

    So does whatever loads the state of a module or an optimizer, by ``copy_`` or ``to``. The bytes
    go to where they stay, and need no further memory on the device. The host waits for none of the
    last `AT_ONCE` chunks, and has no more of pinned memory. Raises `PreampUnavailableError` where
    it has no such memory to give. A tensor that is moved twice is copied once.
    """

    def __init__(self) -> None:
        super().__init__()
        # What was moved, and the result; by the ``id`` of the first
        self._moved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._full = deque[tuple[list[torch.cuda.Event], torch.Tensor]]()
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0  # bytes of the chunk
        self._devices: set[torch.device] = set()  # to which these are on their way

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Take over what copies from the CPU to a device, and call anything else."""
        kwargs = kwargs or {}
        if func is _COPY and len(args) > 1 and _fits(args[0], args[1]):
            self._fill(args[0].detach(), args[1])
            return args[0]
        if func is _MOVE and not kwargs.keys() - _UNDERSTOOD and _can_be_sent(args[0]):
            kind = _asked_for(args[0], (*args[1:], kwargs.get("device"), kwargs.get("dtype")))
            if kind is not None:
                return self._moved_to(args[0], *kind, copy=kwargs.get("copy", False))
        return func(*args, **kwargs)

    def _moved_to(
        self, source: torch.Tensor, device: torch.device, dtype: torch.dtype, *, copy: bool
    ) -> torch.Tensor:
        known = self._moved.get((id(source), device, dtype))
        if known is not None and not copy:
            return known[1]
        made = sharded_as(_like(local_of(source).to(dtype), device), source)
        self._fill(made.detach(), source)
        self._moved[id(source), device, dtype] = source, made
        return made

    def _fill(self, into: torch.Tensor, source: torch.Tensor) -> None:
        target, value = local_of(into), local_of(source.detach()).to(into.dtype)
        increment_version(target)  # once, as one copy would do; first, so that no write is unseen
        order = memory_order(target)
        to_bytes = target.data.permute(order).view(-1).view(torch.uint8)
        own_bytes = value.resolve_conj().resolve_neg().permute(order).reshape(-1).view(torch.uint8)
        at, end = 0, own_bytes.numel()
        while at < end:
            if self._used == self._chunk.numel():
                self._begin_chunk(target.device)
            size = min(end - at, self._chunk.numel() - self._used)
            pinned = self._chunk[self._used : self._used + size]
            pinned.copy_(own_bytes[at : at + size])
            to_bytes[at : at + size].copy_(pinned, non_blocking=True)
            self._devices.add(target.device)
            at, self._used = at + size, self._used + size

    def _begin_chunk(self, device: torch.device) -> None:
        if self._devices:
            events = [torch.cuda.Event() for _ in self._devices]
            for event, on in zip(events, self._devices, strict=True):
                event.record(torch.cuda.current_stream(on))
            self._full.append((events, self._chunk))
            self._chunk, self._used = self._chunk[:0], 0  # whatever comes, it is queued once
            self._devices.clear()
        if len(self._full) < AT_ONCE:
            self._chunk = _pinned(CHUNK, device)
        else:
            events, self._chunk = self._full.popleft()
            for event in events:
                event.synchronize()
        self._used = 0


_COPY, _MOVE = torch.Tensor.copy_, torch.Tensor.to
_UNDERSTOOD = {"device", "dtype", "copy", "non_blocking"}


def _can_be_sent(source: Any) -> bool:
    if not isinstance(source, torch.Tensor) or source.device.type != "cpu":
        return False
    is_plain = is_sharded(source) or not hasattr(source, "__tensor_flatten__")
    return is_plain and source.layout is torch.strided and not source.requires_grad


def has_form_of(into: Any, source: torch.Tensor) -> bool:
    """Whether the bytes of ``source``, on the CPU, can be sent into a tensor of a CUDA device."""
    own, value = local_of(into), local_of(source)
    return _fits(into, source) and (own.dtype, memory_order(own)) == (
        value.dtype,
        memory_order(value),
    )


def _fits(into: Any, source: Any) -> bool:
    """Whether ``source`` can be sent into ``into``, which may be of another dtype or order."""
    if not _can_be_sent(source) or into.shape != source.shape:
        return False
    if getattr(into, "placements", None) != getattr(source, "placements", None):
        return False
    own = local_of(into)
    is_dense = own.layout is torch.strided and own.permute(memory_order(own)).is_contiguous()
    return own.is_cuda and is_dense


def _asked_for(
    source: torch.Tensor, asked: Iterable[Any]
) -> tuple[torch.device, torch.dtype] | None:
    """The CUDA device and the dtype that arguments of ``to`` name; ``None`` for anything else."""
    device, dtype = None, source.dtype
    for one in asked:
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, (torch.device, str)):
            device = torch.device(one)
        elif one is not None:
            return None
    if device is None or device.type != "cuda":
        return None
    return torch.empty(0, device=device).device, dtype  # which has a number


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
