# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""What the kernels share: their chunk, loads and stores with exact rounding, scalars.

Every kernel runs over its chunk twice: once over the blocks that are whole and aligned, where each
thread accesses several elements at once, then over the rest behind a mask, one by one. Elements are
read in storage order.

A thread has the same elements of all lists. Triton stores no more than 16 bytes at once, and moves
values between threads, past a barrier, where it has loaded more elements than it may store. So a
kernel's ``WIDTH`` is how many elements of the widest list that it writes these bytes hold.
"""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import helper

BLOCK = tl.constexpr(1024)
"""Elements per iteration: eight for each thread of four warps."""


@helper
def find_chunk(layout, n, CHUNK: tl.constexpr):
    """Return this program's tensor, its first element there, and how many it has."""
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(layout + 3 * n + 1 + chunk)
    start = (chunk - tl.load(layout + n + tensor)) * CHUNK
    count = tl.minimum(tl.load(layout + tensor) - start, CHUNK).to(tl.int32)
    return tensor, start, count


@helper
def address(pointers, n, row: tl.constexpr, tensor):
    """Return the address in ``row`` for ``tensor``."""
    return tl.load(pointers + row * n + tensor)


@helper
def address_if(pointers, n, row: tl.constexpr, tensor, KIND: tl.constexpr):
    """The address in ``row``, or one that is aligned and not used where the list has no dtype."""
    if KIND is not None:
        return address(pointers, n, row, tensor)
    else:
        return tl.zeros((), tl.int64)


@helper
def whole_blocks(addresses, count):
    """Elements that can be read 16 bytes at a time; ``addresses`` are or-ed together."""
    return tl.where((addresses & 15) == 0, count // BLOCK * BLOCK, 0)


@helper
def bounds(whole, count, AT_ONCE: tl.constexpr):
    """First and last element of a run: the whole blocks, or what is left behind them.

    The loops are ``while`` loops, since older interpreters fail on ``range`` with recent numpy.
    """
    if AT_ONCE == 1:
        return whole, count
    else:
        return whole * 0, whole


@helper
def load(at, start, where, mask, AT_ONCE: tl.constexpr, KIND: tl.constexpr):
    """Load elements of dtype ``KIND`` widened to float32."""
    return widen(read(at, start, where, mask, AT_ONCE, KIND), KIND)


@helper
def _pointer(at, KIND: tl.constexpr):
    """Where elements are stored: bfloat16 as the int16 that holds its bits."""
    if KIND == tl.bfloat16:
        return at.to(tl.pointer_type(tl.int16))
    else:
        return at.to(tl.pointer_type(KIND))


@helper
def read(at, start, where, mask, AT_ONCE: tl.constexpr, KIND: tl.constexpr):
    """Load elements as they are stored."""
    places = _pointer(at, KIND) + start + where
    if AT_ONCE == 1:
        return tl.load(places, mask=mask, other=0)
    else:
        return tl.load(tl.max_contiguous(tl.multiple_of(places, 16), AT_ONCE))


@helper
def store(at, start, where, mask, AT_ONCE: tl.constexpr, KIND: tl.constexpr, raw):
    """Store what `narrow` returned."""
    places = _pointer(at, KIND) + start + where
    if AT_ONCE == 1:
        tl.store(places, raw, mask=mask)
    else:
        tl.store(tl.max_contiguous(tl.multiple_of(places, 16), AT_ONCE), raw)


@helper
def narrow(x, KIND: tl.constexpr):
    """Round to nearest even, once; bfloat16 as the int16 that holds its bits.

    bfloat16 in integer arithmetic, because Triton's interpreter rounds it differently.
    """
    if KIND == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)
    else:
        return x.to(KIND)


@helper
def widen(raw, KIND: tl.constexpr):
    """Undo `narrow`."""
    if KIND == tl.bfloat16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@helper
def load_one(at, KIND: tl.constexpr):
    """Load the 0-dim tensor at an address."""
    return widen(tl.load(_pointer(at, KIND)), KIND)


@helper
def store_one(at, KIND: tl.constexpr, x):
    """Round into the 0-dim tensor at an address."""
    tl.store(_pointer(at, KIND), narrow(x, KIND))


@helper
def number(bits):
    """A Python float, which comes as its bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@helper
def scalar(bits, at, ON_DEVICE: tl.constexpr):
    """A hyper-parameter: the 0-dim tensor if there is one, else the number."""
    if ON_DEVICE:
        return tl.load(at).to(tl.float32)
    else:
        return number(bits)


@helper
def spared(count, found_inf_at, FOUND_INF_AT: tl.constexpr):
    """``count``, or nothing to do if an overflow was found."""
    if FOUND_INF_AT:
        return tl.where(tl.load(found_inf_at) != 0, 0, count)
    else:
        return count


@helper
def factor_or_one(at, ON_DEVICE: tl.constexpr):
    """A factor that may be missing."""
    if ON_DEVICE:
        return tl.load(at).to(tl.float32)
    else:
        return tl.full((), 1, tl.float32)


@helper
def divide(a, b):
    """IEEE division; Triton's ``/`` is faster than that."""
    return tl.div_rn(a, b)


@helper
def root(x):
    """IEEE square root; Triton's ``sqrt`` is faster than that."""
    return tl.sqrt_rn(x)


@helper
def correction(bits, step_at, ON_DEVICE: tl.constexpr):
    """``1 - beta ** step``; for a step on the device from its number, ``log(beta)``.

    As ``-expm1``: the plain difference would lose half the digits of ``1 - 0.999``.
    """
    if ON_DEVICE:
        return _less_than_one(tl.load(step_at).to(tl.float32) * number(bits))
    else:
        return number(bits)


@helper
def _expm1(y):
    """``exp(y) - 1`` near zero."""
    series = y * 0
    for k in tl.static_range(12, 1, -1):
        series = (series + 1) * divide(y, k)
    return (series + 1) * y


@helper
def _less_than_one(y):
    """``1 - exp(y)`` within an ulp, for ``y`` below zero.

    On CUDA ``exp`` of a float32 is an approximation that would leave errors of 5 ulps. So
    ``y = n * log(2) + r`` with ``r`` near zero, where ``log(2)`` is taken in two parts.
    """
    y = tl.maximum(y, -64.0)  # nothing is left of exp(y) long before
    n = (y * 1.4426950408889634 - 0.5).to(tl.int32)
    power = ((n + 127) << 23).to(tl.float32, bitcast=True)
    whole = n.to(tl.float32)
    r = (y - whole * 0.693359375) - whole * -2.12194440e-4
    return (1 - power) - power * _expm1(r)


@helper
def magnitude_bits(x):
    """The bits of ``abs(x)``, which are ordered as the magnitudes are, nan last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@helper
def value_of_bits(bits):
    """The magnitude that `magnitude_bits` took apart."""
    return bits.to(tl.float32, bitcast=True)
