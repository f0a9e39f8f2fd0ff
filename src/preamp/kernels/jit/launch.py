# SPDX-License-Identifier: BSD-3-Clause
"""Tables of where tensors lie, the chunks they are cut into, and the threads that walk these.

Chunks have the same size whatever the number of threads, and what is summed is summed chunk by
chunk and then in their order: so results have the same bits with any number of them. Threads are
Python's own over kernels that hold no lock. numba's would be another pool beside torch's, of which
the one that is always there aborts when two threads of a program use it, and the one that needs
OpenMP when the program forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

CHUNK = 1 << 14
"""Elements of a chunk; a multiple of what vectors hold and of what is summed at once."""

_SHARE = 1 << 16
"""Elements that are worth another thread."""

_address_of = torch.Tensor.data_ptr
_numel_of = torch.Tensor.numel


@dataclass(frozen=True, slots=True)
class Chunks:
    """How tensors of some sizes are cut."""

    table: np.ndarray  # int64: of each chunk its tensor, its first element there, how many it has
    numel: int  # elements of all
    count: int  # number of tensors
    # By number of threads: where the chunks of each begin, and the end
    _shares: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def shares(self, threads: int) -> list[int]:
        """Cut the chunks themselves into so many runs of about as many elements."""
        if threads not in self._shares:
            ends = np.cumsum(self.table[2])
            wanted = np.arange(1, threads) * (self.numel / threads)
            inner = np.searchsorted(ends, wanted).tolist()
            self._shares[threads] = [0, *inner, self.table.shape[1]]
        return self._shares[threads]


def cut(sizes: Sequence[int]) -> Chunks:
    """Cut tensors of these sizes into chunks; empty ones have none."""
    numels = np.asarray(sizes, dtype=np.int64)
    counts = -(-numels // CHUNK)
    first = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(numels), dtype=np.int64), counts)
    starts = (np.arange(len(owners), dtype=np.int64) - first[owners]) * CHUNK
    lengths = np.minimum(numels[owners] - starts, CHUNK)
    return Chunks(np.stack([owners, starts, lengths]), int(numels.sum()), len(numels))


_cut = lru_cache(maxsize=64)(cut)
_known: dict[int, tuple[Any, Chunks]] = {}


def chunks_of(
    rows: Sequence[Sequence[torch.Tensor]], shapes: tuple[torch.Size, ...] | None
) -> Chunks:
    """The chunks of the first of ``rows``; found at once for a tuple of shapes that was seen."""
    if shapes is None:
        return _cut(tuple(map(_numel_of, rows[0])))
    known = _known.get(id(shapes))
    if known is None or known[0] is not shapes:
        if len(_known) > 64:
            _known.pop(next(iter(_known)), None)
        known = _known[id(shapes)] = (shapes, cut([shape.numel() for shape in shapes]))
    return known[1]


def addresses(rows: Sequence[Sequence[torch.Tensor]]) -> np.ndarray:
    """Where the tensors of each row lie now, int64; zeros for a row that has none."""
    at = np.zeros((len(rows), len(rows[0])), dtype=np.int64)
    for place, row in enumerate(rows):
        if row:
            at[place] = np.fromiter(map(_address_of, row), np.int64, len(row))
    return at


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
"""By process, since threads do not come along in a fork, and by their number."""


def _pool(threads: int) -> ThreadPoolExecutor:
    key = os.getpid(), threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="preamp")
    return _pools[key]


def walk(kernel: Callable[..., Any], chunks: Chunks, rows: Sequence[Any], *arguments: Any) -> None:
    """Call ``kernel`` on all chunks, in as many threads as torch takes; returns when it is done.

    ``rows`` are what it reads and writes, to be kept meanwhile.
    """
    at, total = addresses(rows), chunks.table.shape[1]
    if not total:
        return
    threads = min(torch.get_num_threads(), chunks.numel // _SHARE, total)
    if threads < 2:
        kernel(0, total, chunks.table, at, *arguments)
        return
    ends = chunks.shares(threads)

    def run(share: int) -> None:
        kernel(ends[share], ends[share + 1], chunks.table, at, *arguments)
        del_rows = rows  # they live as long as the last thread that writes to them
        del del_rows

    others: list[Future[None]] = []
    try:
        others += [_pool(threads - 1).submit(run, share) for share in range(1, threads)]
        run(0)
    finally:
        wait(others)
    for other in others:
        other.result()
