# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""The kernels: each walks some of the chunks that tensors were cut into, block by block.

``chunks`` has three rows: of every chunk its tensor, its first element there, and how many it has.
``at`` has a row of addresses for every list, and ``kinds`` the code of its dtype: parameters,
gradients, state, and halves if there are any. ``math`` is a zero of the dtype of the computation,
which all numbers have too. Names in capitals are options, ``None`` for no.
"""

from __future__ import annotations

from preamp.kernels.jit.compiler import kernel
from preamp.kernels.jit.formulas import direction, length, stepped
from preamp.kernels.jit.words import (
    add,
    finite_or_zero,
    higher,
    itemsize,
    magnitude,
    memory,
    peek,
    place,
    poke,
    put_back,
    round_stored,
    value_of,
    widen,
    widened,
)

BLOCK = 1024
"""Elements that are at hand at once, in every list; also how many squares are added up in the dtype
of the computation, before their sum joins others in float64."""


@kernel
def sum_squares(first, last, chunks, at, X, math, factor, sums):
    """Per chunk the sum of squares of values × ``factor``.

    ``X`` is a zero of the type that values are stored in.
    """
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        total = 0.0
        for begin in range(0, count, BLOCK):
            squares = math
            x = at[0, tensor] + (start + begin) * itemsize(X)
            for i in range(min(count - begin, BLOCK)):
                value = widen(peek(x, i, X), math)
                if factor is not None:
                    value = value * factor
                squares = add(squares, value * value)
            total += squares
        sums[chunk] = total


@kernel
def find_largest(first, last, chunks, at, X, largest, finite):
    """Per chunk the largest magnitude, and if wanted the largest finite one; not finite are above.

    ``X`` is a zero of the type that values are stored in.
    """
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        top = magnitude(X)
        top_finite = top
        x = at[0, tensor] + start * itemsize(X)
        for i in range(count):
            raw = peek(x, i, X)
            bits = magnitude(raw)
            top = higher(top, bits)
            if finite is not None:
                top_finite = higher(top_finite, finite_or_zero(bits, raw))
        largest[chunk] = value_of(top, X)
        if finite is not None:
            finite[chunk] = value_of(top_finite, X)


@kernel
def combine(first, last, chunks, at, kinds, math, a, b, each):
    """``target = a * x + b * y``; without ``a`` or ``b`` the values themselves."""
    room = memory(3, BLOCK, math)
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        factor = a
        if each is not None:
            factor = each[tensor]
        for begin in range(start, start + count, BLOCK):
            n = min(start + count - begin, BLOCK)
            target = place(at, 0, tensor, begin, kinds)
            x = widened(place(at, 1, tensor, begin, kinds), kinds[1], n, room[0].ctypes.data, math)
            result = room[2].ctypes.data
            if kinds[2]:
                y = place(at, 2, tensor, begin, kinds)
                y = widened(y, kinds[2], n, room[1].ctypes.data, math)
                for i in range(n):
                    value, other = peek(x, i, math), peek(y, i, math)
                    if factor is not None:
                        value = value * factor
                    if b is not None:
                        other = other * b
                    poke(result, i, value + other)
            elif factor is not None:
                for i in range(n):
                    poke(result, i, peek(x, i, math) * factor)
            else:
                result = x
            put_back(result, target, kinds[0], n, math)


@kernel
def two_moments(first, last, chunks, at, kinds, math, inv_scale, each, rule):
    """An update of Adam or LAMB; ``each`` has a number for each tensor."""
    room = memory(4, BLOCK, math)
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        size = length(each[tensor], rule)
        for begin in range(start, start + count, BLOCK):
            n = min(start + count - begin, BLOCK)
            p_at, g_at = place(at, 0, tensor, begin, kinds), place(at, 1, tensor, begin, kinds)
            m_at, v_at = place(at, 2, tensor, begin, kinds), place(at, 3, tensor, begin, kinds)
            ps = widened(p_at, kinds[0], n, room[0].ctypes.data, math)
            gs = widened(g_at, kinds[1], n, room[1].ctypes.data, math)
            ms = widened(m_at, kinds[2], n, room[2].ctypes.data, math)
            vs = widened(v_at, kinds[3], n, room[3].ctypes.data, math)
            for i in range(n):
                p, g = peek(ps, i, math), peek(gs, i, math) * inv_scale
                u, m, v = direction(p, g, peek(ms, i, math), peek(vs, i, math), rule)
                poke(ms, i, m)
                poke(vs, i, v)
                poke(ps, i, p - size * u)
            put_back(ms, m_at, kinds[2], n, math)
            put_back(vs, v_at, kinds[3], n, math)
            put_back(ps, p_at, kinds[0], n, math)
            half_at = place(at, 4, tensor, begin, kinds)
            round_stored(p_at, kinds[0], half_at, kinds[4], n, room[0].ctypes.data, math)


@kernel
def measure_directions(first, last, chunks, at, kinds, math, inv_scale, p_sums, u_sums, rule):
    """Per chunk the sums of squares of the parameters and of the directions of `two_moments`."""
    room = memory(4, BLOCK, math)
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        p_total = 0.0
        u_total = 0.0
        for begin in range(start, start + count, BLOCK):
            n = min(start + count - begin, BLOCK)
            p_at, g_at = place(at, 0, tensor, begin, kinds), place(at, 1, tensor, begin, kinds)
            m_at, v_at = place(at, 2, tensor, begin, kinds), place(at, 3, tensor, begin, kinds)
            ps = widened(p_at, kinds[0], n, room[0].ctypes.data, math)
            gs = widened(g_at, kinds[1], n, room[1].ctypes.data, math)
            ms = widened(m_at, kinds[2], n, room[2].ctypes.data, math)
            vs = widened(v_at, kinds[3], n, room[3].ctypes.data, math)
            p_squares = math
            u_squares = math
            for i in range(n):
                p, g = peek(ps, i, math), peek(gs, i, math) * inv_scale
                u = direction(p, g, peek(ms, i, math), peek(vs, i, math), rule)[0]
                p_squares = add(p_squares, p * p)
                u_squares = add(u_squares, u * u)
            p_total += p_squares
            u_total += u_squares
        p_sums[chunk] = p_total
        u_sums[chunk] = u_total


@kernel
def one_moment(first, last, chunks, at, kinds, math, inv_scale, each, rule):
    """An update of any other rule; without state it has ``kinds`` of none in its place."""
    room = memory(3, BLOCK, math)
    for chunk in range(first, last):
        tensor, start, count = chunks[0, chunk], chunks[1, chunk], chunks[2, chunk]
        number = each[tensor]
        for begin in range(start, start + count, BLOCK):
            n = min(start + count - begin, BLOCK)
            p_at, g_at = place(at, 0, tensor, begin, kinds), place(at, 1, tensor, begin, kinds)
            m_at = place(at, 2, tensor, begin, kinds)
            ps = widened(p_at, kinds[0], n, room[0].ctypes.data, math)
            gs = widened(g_at, kinds[1], n, room[1].ctypes.data, math)
            ms = widened(m_at, kinds[2], n, room[2].ctypes.data, math)
            for i in range(n):
                p, g = peek(ps, i, math), peek(gs, i, math) * inv_scale
                p, m = stepped(p, g, peek(ms, i, math), number, rule)
                poke(ms, i, m)
                poke(ps, i, p)
            put_back(ms, m_at, kinds[2], n, math)
            put_back(ps, p_at, kinds[0], n, math)
            half_at = place(at, 3, tensor, begin, kinds)
            round_stored(p_at, kinds[0], half_at, kinds[3], n, room[0].ctypes.data, math)
