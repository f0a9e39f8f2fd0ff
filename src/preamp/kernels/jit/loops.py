# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""The kernels, each of which walks some chunks of tensors block by block, and how they are started.

Lists of tensors are cut into chunks of the same size whatever the number of threads, and what is
summed is summed chunk by chunk and then in their order: so results have the same bits with any
number of them, unless the program lets its own thread alone flush subnormal numbers. Threads are
Python's own over kernels that hold no lock. numba's would be another pool beside torch's, of which
the one that is always there aborts when two threads of a program use it, and the one that needs
OpenMP when the program forks.

In kernels ``chunks`` has three rows: of every chunk its tensor, its first element there, and how
many it has. ``at`` has a row of addresses for every list, and ``kinds`` the code of its dtype:
parameters, gradients, state, and halves if there are any. ``room`` is the address of `_LISTS`
blocks of float32, and ``found`` has room for as many addresses.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from preamp.kernels.jit.compiler import function, kernel, part
from preamp.kernels.jit.formats import ODDS, chances, half_of, join, low_of, pack, unpack
from preamp.kernels.jit.formulas import direction, stepped
from preamp.kernels.jit.words import (
    CODES,
    WIDTHS,
    ZEROS,
    add,
    higher,
    itemsize,
    magnitude,
    narrow,
    peek,
    poke,
    put_back,
    take_over,
    taken_over,
    value_of,
    widen,
    widened,
)
from preamp.kernels.plans import Plan
from preamp.kernels.stored import blocks_of

CHUNK = 1 << 14
"""Elements of a chunk; a multiple of what vectors hold and of what is summed at once."""

_SHARE = 1 << 16
"""Elements that are worth another thread."""

BLOCK = 1024
"""Elements that are at hand at once, in every list; also how many squares are added up in
float32, before their sum joins others in float64."""

_F32 = ZEROS[torch.float32]
_LISTS = 5
"""Most lists of a kernel; in so many blocks it finds room for what it widens."""

_IS_F32 = CODES[torch.float32]
"""The last of the codes of dtypes; those of formats are above."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """How tensors of some sizes are cut."""

    table: np.ndarray  # int64: of each chunk its tensor, its first element there, how many it has
    numel: int  # elements of all
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
    return Chunks(np.stack([owners, starts, lengths]), int(numels.sum()))


def chunks_of(plan: Plan) -> Chunks:
    """The chunks of a plan's first list."""
    if "chunks" not in plan.kept:
        plan.kept["chunks"] = cut(plan.sizes)
    return plan.kept["chunks"]


@lru_cache(maxsize=64)
def blocks_in(shapes: tuple[torch.Size, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of tensors of these shapes the elements of a row, and of a block of one, int64."""
    rows = [shape[1:].numel() for shape in shapes]
    lengths = [blocks_of(shape)[2] if shape else 0 for shape in shapes]
    return np.array(rows, np.int64), np.array(lengths, np.int64)


def in_blocks(chunks: Chunks, rows: np.ndarray, lengths: np.ndarray) -> Chunks:
    """The chunks with their ends moved to those of blocks, of what `blocks_in` says."""
    owners, starts, counts = chunks.table
    ends = starts + counts
    first = starts - starts % rows[owners] % lengths[owners]
    is_inner = np.append(owners[1:] == owners[:-1], [False])
    last = np.where(is_inner, np.append(first[1:], [0]), ends)
    return replace(chunks, table=np.stack([owners, first, last - first]), _shares={})


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
"""By process, since threads do not come along in a fork, and by their number."""


def _pool(threads: int) -> ThreadPoolExecutor:
    key = os.getpid(), threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="preamp")
    return _pools[key]


class _Room(threading.local):
    """Memory of a thread for what kernels widen, and for the addresses of what they have found."""

    def __init__(self) -> None:
        self.blocks = np.empty((_LISTS + 1, BLOCK), np.float32)
        self.found = np.empty(_LISTS, np.int64)
        self.address = self.blocks.ctypes.data


_room = _Room()


def walk(kernel: Any, chunks: Chunks, rows: Sequence[Any], at: np.ndarray, *arguments: Any) -> None:
    """Call ``kernel`` on all chunks, in as many threads as torch takes; returns when it is done.

    ``rows`` are what it reads and writes, to be kept meanwhile, and ``at`` is where they lie. An
    interrupt is raised when all threads have ended; tensors may be updated in part then.
    """
    total = chunks.table.shape[1]
    if not total:
        return

    def run(first: int, last: int) -> None:
        kernel(first, last, chunks.table, at, _room.address, _room.found, *arguments)
        len(rows)  # which live as long as the last thread that writes to them

    threads = min(torch.get_num_threads(), chunks.numel // _SHARE, total)
    if threads < 2:
        run(0, total)
        return
    ends = chunks.shares(threads)

    others: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no more threads
            for share in range(1, threads):
                others.append(_pool(threads - 1).submit(run, ends[share], ends[share + 1]))
        run(0, ends[1])
        if len(others) + 1 < threads:
            run(ends[len(others) + 1], total)
    finally:
        _wait_for(others)
    for other in others:
        other.result()


def _wait_for(others: Sequence[Future[None]]) -> None:
    """Wait till all have ended, since they write to memory; an interrupt is raised then."""
    interrupt: BaseException | None = None
    while not all([other.done() for other in others]):
        try:
            wait(others)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


# -- kernels ---------------------------------------------------------------------------------------


@function
def last_at_hand(begin, last, tensor, layout):
    """Where the elements end that are at hand together, in whole blocks of a tensor in blocks."""
    end = min(begin + BLOCK, last)
    if layout is None:
        return end
    length = layout.lengths[tensor]
    if length and end < last:
        end -= end % layout.rows[tensor] % length
    return end


@function
def find_lists(first, last, at, kinds, tensor, begin, n, room, found, half, low, layout):
    """Find elements of some lists as float32; put in ``found`` where.

    With ``half`` they are where they are, in the list of halves too; with ``low`` that is true of
    parameters, lows, in place of halves, and gradients.
    """
    for row in range(first, last if half is None else last + 1):
        stored = at[row, tensor] + begin * WIDTHS[kinds[row]]
        if half is None or (low is not None and 1 < row < last):
            values = room + row * BLOCK * 4
            if layout is not None and kinds[row] > _IS_F32:
                beside = at[_beside(row, last), tensor]
                unpack(stored, kinds[row], beside, tensor, begin, n, values, layout)
                stored = values
            else:
                stored = widened(stored, kinds[row], n, values)
        found[row] = stored
    if low is not None:
        found[last] = at[last + 1, tensor] + begin * itemsize(low)


@part
def _beside(row, lists):
    """Which row of addresses has the lows of the parameters, or the scales of a list of state."""
    return lists + 1 + max(row - 1, 0)


@function
def put_lists_back(lists, at, kinds, tensor, begin, n, room, found, half, low, layout):
    """Round elements into all lists but the gradients, and stored parameters into halves.

    With ``half`` they are there already; with ``low`` that is true of parameters.
    """
    if half is not None and low is None:
        return
    chance = room + 4 * _LISTS * BLOCK
    if layout is not None and layout.by_chance:
        chance = chances(tensor, begin, n, chance, layout)
    for row in range(0 if low is None else 2, lists + 1):
        stored = at[row, tensor] + begin * WIDTHS[kinds[row]]
        values = found[row]
        if layout is not None and kinds[row] > _IS_F32:
            beside, by = at[_beside(row, lists), tensor], ODDS[max(row - 2, 0)]
            pack(values, stored, kinds[row], beside, tensor, begin, n, chance, by, layout)
            continue
        if row == lists and kinds[row]:
            values = at[0, tensor] + begin * WIDTHS[kinds[0]]
            values = widened(values, kinds[0], n, room)
        if row != 1:
            put_back(values, stored, kinds[row], n)


@kernel
def sum_squares(first, last, chunks, at, room, found, X, factor, sums):
    """Per chunk the sum of squares of values × ``factor``.

    ``X`` is a zero of the type that values are stored in.
    """
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        total = 0.0
        for begin in range(0, count, BLOCK):
            squares = _F32
            x = at[0, tensor] + (start + begin) * itemsize(X)
            for i in range(min(count - begin, BLOCK)):
                value = widen(peek(x, i, X)) * factor
                squares = add(squares, value * value)
            total += squares
        sums[chunk] = total


@kernel
def find_largest(first, last, chunks, at, room, found, X, largest):
    """Per chunk the largest magnitude; those that are not finite are above.

    ``X`` is a zero of the type that values are stored in.
    """
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        top = magnitude(X)
        x = at[0, tensor] + start * itemsize(X)
        for i in range(count):
            top = higher(top, magnitude(peek(x, i, X)))
        largest[chunk] = value_of(top, X)


@kernel
def combine(first, last, chunks, at, room, found, kinds, each, b, is_copy):
    """``target = a * x + b * y``, with ``each`` tensor's a; of a copy ``x`` alone."""
    result = room + 3 * BLOCK * 4
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        a = each[tensor]
        for begin in range(start, start + count, BLOCK):
            n = min(start + count - begin, BLOCK)
            find_lists(1, 3, at, kinds, tensor, begin, n, room, found, None, None, None)
            x, y = found[1], found[2]
            target = at[0, tensor] + begin * WIDTHS[kinds[0]]
            if is_copy:
                put_back(x, target, kinds[0], n)
                continue
            if kinds[2]:
                for i in range(n):
                    poke(result, i, peek(x, i, _F32) * a + peek(y, i, _F32) * b)
            else:
                for i in range(n):
                    poke(result, i, peek(x, i, _F32) * a)
            put_back(result, target, kinds[0], n)


@kernel
def take_over_lists(first, last, chunks, at, room, found, kinds):
    """Let masters say what half weights do."""
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        masters = at[0, tensor] + start * 4
        take_over(masters, at[1, tensor] + start * WIDTHS[kinds[1]], kinds[1], count)


@kernel
def split_lists(first, last, chunks, at, room, found, half, low):
    """Values into ``half`` ones and, if wanted, what is beside them; see `formats.half_of`."""
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        values = at[0, tensor] + start * itemsize(_F32)
        halves = at[1, tensor] + start * itemsize(half)
        if low is None:
            for i in range(count):
                poke(halves, i, half_of(peek(values, i, _F32), half))
        else:
            lows = at[2, tensor] + start * itemsize(low)
            for i in range(count):
                value = peek(values, i, _F32)
                poke(halves, i, half_of(value, half))
                poke(lows, i, low_of(value, half))


@kernel
def join_lists(first, last, chunks, at, room, found, half, low):
    """The values that `split_lists` was given."""
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        values = at[0, tensor] + start * itemsize(_F32)
        halves = at[1, tensor] + start * itemsize(half)
        lows = at[2, tensor] + start * itemsize(low)
        for i in range(count):
            poke(values, i, join(peek(halves, i, half), peek(lows, i, low)))


@kernel
def update(
    first, last, chunks, at, room, found, kinds, layout, half, low, second, leads, inv_scale,
    each, rule
):  # fmt: skip
    """An update by ``rule``, a record of `formulas`; ``each`` has a number for each tensor.

    ``second`` is a float32 zero where there are two lists of state, else ``None``; state that
    is not there has no kind. ``half`` is a zero of the type of gradients and halves where all
    else is float32: these are converted on the way then. Else it is ``None``. ``low`` is one of
    the type of lows where gradients and parameters are both of ``half``, split ones; they stand
    in for halves. Where halves lead, parameters start from `taken_over`: on the way, or where
    ``leads`` says so. ``layout`` is that of lists that are kept in fewer bits, or ``None``;
    chunks are whole blocks.
    """
    lists = 3 if second is None else 4
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        number = each[tensor]
        begin, until = start, start + count
        while begin < until:
            end = last_at_hand(begin, until, tensor, layout)
            n = end - begin
            find_lists(0, lists, at, kinds, tensor, begin, n, room, found, half, low, layout)
            ps, gs, ms, vs, hs = found[0], found[1], found[2], found[3], found[lists]
            if leads:  # a float32 parameter is where it is
                own = at[lists, tensor] + begin * WIDTHS[kinds[lists]]
                take_over(ps, own, kinds[lists], n)
            for i in range(n):
                if low is not None:
                    p = join(peek(ps, i, half), peek(hs, i, low))
                elif half is not None:
                    p = taken_over(peek(ps, i, _F32), peek(hs, i, half))
                else:
                    p = peek(ps, i, _F32)
                if half is None:
                    g = peek(gs, i, _F32) * inv_scale
                else:
                    g = widen(peek(gs, i, half)) * inv_scale
                m = v = peek(ms, i, _F32)
                if second is not None:
                    v = peek(vs, i, _F32)
                p, m, v = stepped(p, g, m, v, number, rule)
                poke(ms, i, m)
                if second is not None:
                    poke(vs, i, v)
                if low is None:
                    poke(ps, i, p)
                    if half is not None:
                        poke(hs, i, narrow(p, half))
                else:
                    poke(ps, i, half_of(p, half))
                    poke(hs, i, low_of(p, half))
            put_lists_back(lists, at, kinds, tensor, begin, n, room, found, half, low, layout)
            begin = end


@kernel
def measure_directions(
    first, last, chunks, at, room, found, kinds, layout, inv_scale, p_sums, u_sums, rule
):
    """Per chunk the sums of squares of the parameters and of the directions of `update`."""
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        p_total = 0.0
        u_total = 0.0
        begin, until = start, start + count
        while begin < until:
            end = last_at_hand(begin, until, tensor, layout)
            n = end - begin
            find_lists(0, 4, at, kinds, tensor, begin, n, room, found, None, None, layout)
            ps, gs, ms, vs = found[0], found[1], found[2], found[3]
            p_squares = _F32
            u_squares = _F32
            for i in range(n):
                p, g = peek(ps, i, _F32), peek(gs, i, _F32) * inv_scale
                u = direction(p, g, peek(ms, i, _F32), peek(vs, i, _F32), rule)[0]
                p_squares = add(p_squares, p * p)
                u_squares = add(u_squares, u * u)
            p_total += p_squares
            u_total += u_squares
            begin = end
        p_sums[chunk] = p_total
        u_sums[chunk] = u_total
