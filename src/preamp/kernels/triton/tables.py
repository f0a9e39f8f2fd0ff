# SPDX-License-Identifier: BSD-3-Clause
"""Device tables: where the tensors of a launch lie, and which program works on what.

A launch takes two int64 tensors. *Pointers* holds one row of addresses per list of tensors.
*Layout* says how the work is cut: for ``n`` tensors, ``[numel] * n``, the first chunk of each and
the number of chunks (``n + 1`` values), the place of each in the results (``n``), and for every
chunk the tensor it belongs to. Addresses change with every backward that allocates gradients,
layouts are a plan's; so a step with new gradients costs one small asynchronous copy.

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

from preamp.core.tensors import is_capturing
from preamp.kernels.plans import Plan

CHUNK = 8192
"""Elements per program: enough to hide the look-ups, few enough to keep a GPU evenly busy.

A multiple of 16, so that chunks of an aligned tensor are aligned.
"""

_KEPT = 128
"""Tables of pointers that are remembered; a step of one optimizer needs a handful."""

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
    plan: Plan,
    rows: np.ndarray | None = None,
    sizes: Sequence[int] | None = None,
    *,
    in_order: bool = False,
) -> Table:
    """Return the table of a plan, a new or a remembered one. Does not synchronise.

    The tensors of the first list are cut into chunks, or what has ``sizes``. ``rows`` are
    addresses, and other numbers, in place of where all lists lie. Results go to the caller's
    places, or with ``in_order`` to those of the plan.
    """
    device, count = plan.device, len(plan.places)
    at = pointers(device, plan.found if rows is None else rows)
    key = stream_of(device), in_order, sizes is None
    layout = None if is_capturing(device) else plan.kept.get(key)
    if layout is None:
        positions = range(count) if in_order else plan.places
        layout = _layout(device, plan.sizes if sizes is None else sizes, positions)
        if not is_capturing(device):
            plan.kept[key] = layout
    return Table(at, layout[0], count, layout[1])


def pointers(device: torch.device, at: np.ndarray) -> torch.Tensor:
    """Addresses on the device, new or remembered."""
    upload = _pointers.__wrapped__ if is_capturing(device) else _pointers
    return upload(device, stream_of(device), at.tobytes())


def layout_of(numels: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a layout on the host, for tensors of these sizes."""
    sizes = np.asarray(numels, dtype=np.int64)
    counts = -(-sizes // CHUNK)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    owners = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    return np.concatenate([sizes, first, np.asarray(positions, dtype=np.int64), owners])


def _layout(
    device: torch.device, numels: Sequence[int], positions: Sequence[int]
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


def stream_of(device: torch.device) -> int:
    """What orders the copy of a table before its use: a table belongs to one stream."""
    if device.type == "cpu":
        return 0
    return torch.get_device_module(device).current_stream(device).stream_id
