# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Lists that are kept in fewer bits, bit by bit as `preamp.kernels.stored` defines them.

Nearly all of it is arithmetic of integers. Products of floats are with powers of two, which are
exact, so that a compiler that fused them with sums would change nothing.

A tensor in blocks is walked in *slots*: every row has whole blocks of them, and those behind its
last element are masked. Where rows are whole blocks anyway slots are elements. Dtypes say how lists
are kept: int8 and uint8 are codes, int16 stands for moments of bfloat16 that are rounded by chance,
and, in place of a half, for the low bits of a split parameter.
"""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.stored import BINADES as _BINADES
from preamp.kernels.stored import BLOCK as _SLOTS
from preamp.kernels.stored import LEAST as _LEAST
from preamp.kernels.stored import MANTISSA as _MANTISSA
from preamp.kernels.stored import ODD as _ODD
from preamp.kernels.stored import Format
from preamp.kernels.triton.device.jit import helper
from preamp.kernels.triton.device.walk import BLOCK, address, load, narrow, read, store, widen

SLOTS = tl.constexpr(_SLOTS)
BLOCKS = tl.constexpr(BLOCK.value // _SLOTS)
ODD = tl.constexpr(_ODD)
LEAST = tl.constexpr(_LEAST)
MANTISSA = tl.constexpr(_MANTISSA)
DROPPED = tl.constexpr(23 - _MANTISSA)
UNIT = tl.constexpr(1 << (23 - _MANTISSA))
CODES = tl.constexpr(1 << _MANTISSA)
"""Of a binade."""
SIGNED_BINADES = tl.constexpr(_BINADES[Format.SIGNED])
UNSIGNED_BINADES = tl.constexpr(_BINADES[Format.UNSIGNED])


@helper
def row_length(pointers, n, KEPT: tl.constexpr, tensor, IN_BLOCKS: tl.constexpr):
    """Elements of a row, or zero where it does not matter."""
    if IN_BLOCKS:
        return address(pointers, n, KEPT + 4, tensor)
    else:
        return tl.zeros((), tl.int64)


@helper
def has_gaps(length):
    """1 where slots are not elements, as an address that is not aligned; else 0."""
    return tl.where(length % SLOTS == 0, 0, 1)


@helper
def scales_of(pointers, n, KEPT: tl.constexpr, tensor, ROW: tl.constexpr, KIND: tl.constexpr):
    """Where the scales of a list are, if it has some."""
    if KIND == tl.int8 or KIND == tl.uint8:
        return address(pointers, n, KEPT + ROW, tensor)
    else:
        return tl.zeros((), tl.int64)


@helper
def lanes(start, first, count, length, AT_ONCE: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """Return an element, how far from it the next ones are, and which of these there are."""
    slots = first + tl.arange(0, BLOCK)
    if IN_BLOCKS and AT_ONCE == 1:
        blocks = (length + SLOTS - 1) // SLOTS  # of a row
        gap = (blocks * SLOTS - length).to(tl.int32)
        block = (start + first) // SLOTS
        row = block // blocks
        column = (block - row * blocks).to(tl.int32)
        blocks = blocks.to(tl.int32)
        ahead = tl.arange(0, BLOCKS)
        rows = (column + ahead) // blocks  # that have ended since
        is_last = (column + ahead) % blocks == blocks - 1
        length = tl.where(is_last, SLOTS - gap, SLOTS)
        lane = tl.arange(0, SLOTS)[None, :]
        is_there = tl.reshape(lane < length[:, None], [BLOCK])
        where = tl.reshape((ahead * SLOTS - rows * gap)[:, None] + lane, [BLOCK])
        return block * SLOTS - row * gap, where, is_there & (slots < count)
    else:
        return start, slots, slots < count


@helper
def _each(values):
    """The value of its block for every slot."""
    return tl.reshape(tl.broadcast_to(values[:, None], [BLOCKS, SLOTS]), [BLOCK])


@helper
def _scale_places(at, start, first, count):
    blocks = tl.arange(0, BLOCKS)
    places = at.to(tl.pointer_type(tl.float32)) + (start + first) // SLOTS + blocks
    return places, blocks * SLOTS < count - first


@helper
def _power(field):
    return (field << 23).to(tl.float32, bitcast=True)


@helper
def load_moment(
    at, scales_at, start, first, count, begin, where, mask,
    AT_ONCE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load elements of a list of state, widened."""
    if KIND == tl.int8 or KIND == tl.uint8:
        places, has_scale = _scale_places(scales_at, start, first, count)
        scales = tl.load(places, mask=has_scale, other=1.0)
        return _decode(read(at, begin, where, mask, AT_ONCE, KIND), scales, KIND)
    elif KIND == tl.int16:
        return load(at, begin, where, mask, AT_ONCE, tl.bfloat16)
    else:
        return load(at, begin, where, mask, AT_ONCE, KIND)


@helper
def store_moment(
    at, scales_at, start, first, count, begin, where, mask,
    AT_ONCE: tl.constexpr, KIND: tl.constexpr, chance, ROW: tl.constexpr, x,
):  # fmt: skip
    """Round elements of a list of state, the ``ROW``-th one, and store them."""
    if ROW == 1:
        chance = (chance * ODD) & 0xFFFF
    if KIND == tl.int8 or KIND == tl.uint8:
        codes, scales = _encode(tl.where(mask, x, 0.0), chance, KIND)
        store(at, begin, where, mask, AT_ONCE, KIND, codes)
        places, has_scale = _scale_places(scales_at, start, first, count)
        tl.store(places, scales, mask=has_scale)
    elif KIND == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        is_finite = (bits & 0x7FFFFFFF) < 0x7F800000
        rounded = ((bits + chance) >> 16).to(tl.int16)
        raw = tl.where(is_finite, rounded, narrow(x, tl.bfloat16))
        store(at, begin, where, mask, AT_ONCE, tl.bfloat16, raw)
    else:
        store(at, begin, where, mask, AT_ONCE, KIND, narrow(x, KIND))


@helper
def _binades(KIND: tl.constexpr):
    if KIND == tl.int8:
        return SIGNED_BINADES
    else:
        return UNSIGNED_BINADES


@helper
def _encode(x, chance, KIND: tl.constexpr):
    """Codes, and the scales of their blocks."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = tl.max(tl.reshape(size, [BLOCKS, SLOTS]), 1)
    field = (tl.minimum(largest, 0x7F7FFFFF) + (UNIT - 1)) >> 23
    field = tl.minimum(tl.maximum(field, LEAST), 254)
    finite = largest < 0x7F800000
    scales = tl.where(finite, field << 23, largest).to(tl.float32, bitcast=True)
    lowest = _each(field - (_binades(KIND) - 2))
    below = (size.to(tl.float32, bitcast=True) + _power(lowest)).to(tl.int32, bitcast=True)
    word = tl.where(size < lowest << 23, below - (1 << 23), size)
    code = ((word + (chance << (DROPPED - 16))) >> DROPPED) - ((lowest - 1) << MANTISSA)
    code = tl.minimum(code, _binades(KIND) * CODES - 1)
    if KIND == tl.uint8:
        code = tl.where((code == 0) & (size > 0), 1, code)
    code = tl.where(_each(largest) < 0x7F800000, tl.where(bits < 0, -code, code), 0)
    return code.to(KIND), scales


@helper
def _decode(codes, scales, KIND: tl.constexpr):
    by = scales.to(tl.int32, bitcast=True)
    lowest = _each(tl.maximum(by >> 23, LEAST) - (_binades(KIND) - 2))
    signed = codes.to(tl.int32)
    code = tl.abs(signed)
    is_below = code < CODES
    above = (code + ((lowest - 1) << MANTISSA)) << DROPPED
    value = tl.where(is_below, above + (1 << 23), above).to(tl.float32, bitcast=True)
    value = tl.where(is_below, value - _power(lowest), value)
    value = tl.where(signed < 0, -value, value)
    return tl.where(_each(by & 0x7FFFFFFF) < 0x7F800000, value, float("nan"))


@helper
def source_of(
    pointers, n, KEPT: tl.constexpr, tensor, seed, turn, turn_at,
    TURN_AT: tl.constexpr, CHANCE: tl.constexpr,
):  # fmt: skip
    """Key, number of the tensor's first element, and turn of what is drawn, if anything is."""
    key = tl.zeros((), tl.int64)
    origin = key
    if CHANCE:
        key = seed.to(tl.int64) | (address(pointers, n, KEPT + 2, tensor) << 32)
        origin = address(pointers, n, KEPT + 3, tensor)
    if TURN_AT:
        turn = tl.load(turn_at)
    return key, origin, turn.to(tl.int64)


@helper
def draw(key, begin, where, turn, AT_ONCE: tl.constexpr, CHANCE: tl.constexpr):
    """The chance of each element, where it is needed.

    Eight elements that follow each other are one group and share its words. In the rest behind
    whole blocks the first of them may be any of its group; then the last ones are of the next.
    """
    if CHANCE:
        ahead = (begin & 7).to(tl.int32) + tl.reshape(where, [BLOCK // 8, 8])
        ahead = tl.min(ahead, 1, keep_dims=True)
        group = (begin >> 3) + (ahead >> 3)
        w0, w1, w2, w3 = _words(key, group, turn)
        if AT_ONCE == 1:
            w4, w5, w6, w7 = _words(key, group + 1, turn)
            by = (ahead & 4) != 0
            w0, w1, w2 = tl.where(by, w2, w0), tl.where(by, w3, w1), tl.where(by, w4, w2)
            w3, w4, w5 = tl.where(by, w5, w3), tl.where(by, w6, w4), tl.where(by, w7, w5)
            by = (ahead & 2) != 0
            w0, w1, w2 = tl.where(by, w1, w0), tl.where(by, w2, w1), tl.where(by, w3, w2)
            w3, w4 = tl.where(by, w4, w3), tl.where(by, w5, w4)
            by = (ahead & 1) != 0
            w0 = tl.where(by, w0 >> 16 | w1 << 16, w0)
            w1 = tl.where(by, w1 >> 16 | w2 << 16, w1)
            w2 = tl.where(by, w2 >> 16 | w3 << 16, w2)
            w3 = tl.where(by, w3 >> 16 | w4 << 16, w3)
        lane = tl.arange(0, 8)[None, :]
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        half = tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16)
        return tl.reshape(half.to(tl.int32), [BLOCK])
    else:
        return tl.zeros([BLOCK], tl.int32)


@helper
def _words(key, counter, step):
    """Philox 4x32-10."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(key, low, high, zero + (step & 0xFFFFFFFF).to(tl.uint32), zero, 10)


# -- split parameters -----------------------------------------------------------------------------


@helper
def load_param(
    p_at, h_at, start, where, mask,
    AT_ONCE: tl.constexpr, P: tl.constexpr, H: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Load parameters: joined with their low bits if they have some, else what half weights say."""
    if H != tl.int16 and LEADS:
        half = load(h_at, start, where, mask, AT_ONCE, H)  # first, which spares registers
    p = load(p_at, start, where, mask, AT_ONCE, P)
    if H == tl.int16:
        p = _join(p, read(h_at, start, where, mask, AT_ONCE, H).to(tl.int32), P)
    elif LEADS:
        p = tl.where(_rounds_to(p, half, H), p, half)
    return p


@helper
def _rounds_to(p, half, H: tl.constexpr):
    """Whether float32 values round to half ones, which are widened, bit for bit.

    bfloat16 has the upper bits of float32, so its words tell by how far they are apart; rounding
    as `narrow` does would take more registers than there are, and spill. nan is led by the half.
    """
    bits = half.to(tl.int32, bitcast=True)
    if H == tl.bfloat16:
        far = tl.abs(p.to(tl.int32, bitcast=True) - bits)
        is_odd = (bits >> 16) & 1
        return (far >= 0) & (far + is_odd <= 0x8000) & (p == p)  # -2**31 has no magnitude
    else:
        return widen(narrow(p, H), H).to(tl.int32, bitcast=True) == bits


@helper
def store_param(
    p_at, h_at, start, where, mask, AT_ONCE: tl.constexpr, P: tl.constexpr, H: tl.constexpr, p
):
    """Store a parameter, and in its half what was stored of it, or the low bits beside it."""
    if H == tl.int16:
        store_split(p_at, h_at, start, where, mask, AT_ONCE, P, H, p)
    else:
        raw = narrow(p, P)
        store(p_at, start, where, mask, AT_ONCE, P, raw)
        if H is not None:
            store(h_at, start, where, mask, AT_ONCE, H, narrow(widen(raw, P), H))


@helper
def store_split(
    p_at, h_at, start, where, mask, AT_ONCE: tl.constexpr, P: tl.constexpr, H: tl.constexpr, p
):
    """Store a parameter as a half one and, if wanted, the low bits beside it."""
    raw, low = _split(p, P)
    store(p_at, start, where, mask, AT_ONCE, P, raw)
    if H is not None:
        store(h_at, start, where, mask, AT_ONCE, H, low)


@helper
def _join(wide, low, P: tl.constexpr):
    bits = wide.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    low = tl.where((size == 0) & (low < 0), 0, low)
    if P == tl.bfloat16:
        word = (bits - ((low & 0x8000) << 1)) | (low & 0xFFFF)
        word = tl.where(size > 0x7F800000, bits, word)
    else:
        far = low.to(tl.float32) * 1.52587890625e-05 * _unit_of(size)
        sum = (size.to(tl.float32, bitcast=True) + far).to(tl.int32, bitcast=True)
        word = tl.where(size < 0x7F800000, sum | (bits & -0x80000000), bits)
    return word.to(tl.float32, bitcast=True)


@helper
def _split(x, P: tl.constexpr):
    """The half, as `narrow` returns it, and the low bits."""
    bits = x.to(tl.int32, bitcast=True)
    if P == tl.bfloat16:
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        half = tl.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16)
        return half, tl.where(is_nan, 0, bits).to(tl.int16)
    else:
        half = x.to(tl.float16).to(tl.int16, bitcast=True)
        # Half way, as far as 16 bits tell, and rounded towards zero, to the even one: one further
        half = tl.where(_distance(x, half) == 0x8000, half + 1, half).to(tl.int16)
        return half.to(tl.float16, bitcast=True), _distance(x, half).to(tl.int16)


@helper
def _distance(x, half):
    """How much larger magnitudes are than the half ones, in 2**-16 of a unit; int32."""
    rounded = half.to(tl.float16, bitcast=True).to(tl.float32)
    size = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    far = (tl.abs(x) - tl.abs(rounded)) * tl.div_rn(tl.zeros_like(x) + 65536.0, _unit_of(size))
    far = tl.where(size < 0x7F800000, far, 0.0)
    # A sum of this magnitude rounds to nearest even.
    return ((far + 12582912.0).to(tl.int32, bitcast=True)) - 0x4B400000


@helper
def _unit_of(size):
    """The unit in the last place of float16 values, from the bits of their magnitudes."""
    field = tl.minimum(tl.maximum(size >> 23, 113), 142) - 10
    return _power(field)
