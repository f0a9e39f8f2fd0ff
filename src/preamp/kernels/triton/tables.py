# SPDX-License-Identifier: BSD-3-Clause
"""Device tables: where the tensors of a launch lie, and which program works on what.

A launch takes two int64 tensors. *Pointers* holds one row of addresses per list of tensors.
*Layout* says how the work is cut: for ``n`` tensors, ``[numel] * n``, the first chunk of each and
the number of chunks (``n + 1`` values), the place of each in the results (``n``), and for every
chunk the tensor it belongs to. Addresses change with every backward that allocates gradients,
layouts hardly ever; so a step with new gradients costs one small asynchronous copy.

A CUDA graph copies its tables again at every replay. So while one is captured nothing remembered
is used, nothing is remembered, and the memory of the host that it reads is kept as long as the
graph. That memory is pinned, and was reserved before: torch's allocator asks events whether older
copies are done, which ends a capture before torch 2.11, and never takes back what it gave in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from preamp.core.errors import bad_state
from preamp.core.tensors import is_capturing
from preamp.kernels.places import Group, addresses

CHUNK = 8192
"""Elements per program: enough to hide the look-ups, few enough to keep a GPU evenly busy.

A multiple of 16, so that chunks of an aligned tensor are aligned.
"""

_KEPT = 128
"""Tables remembered of each kind; a step of one optimizer needs a handful."""

_TABLES_OF_A_GRAPH = 8
"""So many of the largest size are reserved for; a step has four or five large ones."""

_SMALLEST_RESERVE = 1 << 17
"""Values, one MiB of them."""

_read_by_graphs: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()
"""Of each graph what its replays read."""

_read_by_unknown: list[torch.Tensor] = []
"""What is read by graphs that this torch does not tell, which live as long as they like."""


@dataclass(frozen=True, slots=True)
class Table:
    """The two tensors of a launch, with the numbers that the host needs."""

    pointers: torch.Tensor  # int64, one row of ``count`` addresses per list
    layout: torch.Tensor  # int64, see the top of this file
    count: int  # number of tensors
    chunks: int  # number of chunks, the size of the grid


def table(
    rows: Sequence[Sequence[torch.Tensor]],
    positions: Sequence[int],
    numbers: Sequence[Sequence[int]] = (),
    sizes: Sequence[int] | None = None,
) -> Table:
    """Return the table for ``rows``, a new or a remembered one. Does not synchronise.

    The rows are equally long and on one device; the first one is cut into chunks, or what has
    ``sizes``. ``positions`` say where each tensor's results go. ``numbers`` are rows that stand
    behind those of addresses, as they are; they are below 2**63.

    Raises:
        PreampStateError: A tensor has no memory, since its storage was freed.
    """
    device = rows[0][0].device
    stream = _stream(device)
    numels = tuple([t.numel() for t in rows[0]] if sizes is None else sizes)
    at = addresses(rows)
    if not at.all():
        _check_memory(rows, at)
    if numbers:
        at = np.concatenate([at, np.asarray(numbers, dtype=np.int64)])
    find_layout, find_pointers = _layout, _pointers
    if is_capturing(device):
        find_layout, find_pointers = _layout.__wrapped__, _pointers.__wrapped__
    layout, chunks = find_layout(device, stream, numels, tuple(positions))
    return Table(find_pointers(device, stream, at.tobytes()), layout, len(positions), chunks)


def _check_memory(rows: Sequence[Sequence[torch.Tensor]], at: np.ndarray) -> None:
    for row, found in zip(rows, at, strict=True):
        for tensor, address in zip(row, found, strict=True):
            if tensor.numel() and not address:
                raise bad_state(
                    f"A tensor of shape {tuple(tensor.shape)} has no memory",
                    "Kernels read and write parameters, gradients and state where they lie",
                    "Take steps while nothing has freed their storages, as FSDP does meanwhile",
                )


def sizes_of(group: Group) -> Sequence[int] | None:
    """The sizes of the tensors of each row, if they are known."""
    return group.alike.numels if group.alike else None


def layout_of(numels: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a layout on the host, for tensors of these sizes."""
    sizes = np.asarray(numels, dtype=np.int64)
    counts = -(-sizes // CHUNK)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    owners = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    return np.concatenate([sizes, first, np.asarray(positions, dtype=np.int64), owners])


@lru_cache(maxsize=_KEPT)
def _layout(
    device: torch.device, stream: int, numels: tuple[int, ...], positions: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    host = layout_of(numels, positions)
    return _upload(host, device), int(host[2 * len(numels)])


@lru_cache(maxsize=_KEPT)
def _pointers(device: torch.device, stream: int, values: bytes) -> torch.Tensor:
    # Tables are never written again, so a kernel that still reads an old one is not disturbed.
    host: Any = np.frombuffer(values, dtype=np.int64)
    return _upload(host.copy(), device)


def _upload(host: np.ndarray, device: torch.device) -> torch.Tensor:
    values: torch.Tensor = cast("Any", torch).from_numpy(host)
    if is_capturing(device):
        pinned = _reserve.take(values)
        graph = _captured_graph()
        kept = _read_by_unknown if graph is None else _read_by_graphs.setdefault(graph, [])
        kept.append(pinned)
        # The copy itself is memory of the graph, as any result within it.
        return pinned.to(device, non_blocking=True)
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        _reserve.prepare(len(host))
    return values.pin_memory().to(device, non_blocking=True)


def _captured_graph() -> Any:
    """The graph that the current stream is captured into; ``None`` where torch does not say."""
    find = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)  # torch 2.13
    try:
        graph = None if find is None else find()
    except RuntimeError:  # another library captures
        return None
    # Of a graph made in C++ this is a new wrapper, which dies before the graph.
    return graph if isinstance(graph, torch.cuda.CUDAGraph) else None


class _Reserve:
    """Pinned memory for the tables of CUDA graphs, taken by the steps before a capture."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.int64, device="cpu")

    def prepare(self, size: int) -> None:
        """Have room for a graph whose largest table has ``size`` values."""
        wanted = max(_SMALLEST_RESERVE, _TABLES_OF_A_GRAPH * size)
        if self._free.numel() < wanted:
            self._free = torch.empty(wanted, dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """A pinned copy of ``values``, never used again."""
        size = values.numel()
        if self._free.numel() < size:  # nothing of this size ran before
            return values.pin_memory()
        taken, self._free = self._free[:size], self._free[size:]
        return taken.copy_(values)


_reserve = _Reserve()


def _stream(device: torch.device) -> int:
    """What orders the copy of a table before its use: a table belongs to one stream."""
    if device.type == "cpu":
        return 0
    return torch.get_device_module(device).current_stream(device).stream_id
