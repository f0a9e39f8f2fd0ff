# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""Lists that are kept in fewer bits, as `preamp.kernels.stored` defines them, bit by bit.

Elements are unpacked into a block of memory at hand and packed from there. Single elements are
intrinsics: 32 bits wide, as the definition is, where numba's own operations would take 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from preamp.kernels.jit.compiler import function
from preamp.kernels.jit.words import (
    CODES,
    ZEROS,
    bits_of_f32,
    emitted,
    f32_of_bits,
    from_float,
    higher,
    magnitude,
    or_nan,
    peek,
    poke,
    to_float,
)
from preamp.kernels.stored import BINADES, LEAST, MANTISSA, MULTIPLIERS, ODD, WEYL, Format

# Codes of lists beside those of dtypes
_BY_CHANCE, _IS_SIGNED, _IS_UNSIGNED, _SPLIT_F16, _SPLIT_BF16 = range(len(CODES), len(CODES) + 5)
FORMATS = {Format.BFLOAT16: _BY_CHANCE, Format.SIGNED: _IS_SIGNED, Format.UNSIGNED: _IS_UNSIGNED}
SPLITS = {torch.float16: _SPLIT_F16, torch.bfloat16: _SPLIT_BF16}
"""By the dtype of half parameters with lows beside them."""

_F32, _I8, _U8, _I16, _U16 = np.float32(0), np.int8(0), np.uint8(0), np.int16(0), np.uint16(0)
_F16, _BF16 = ZEROS[torch.float16], ZEROS[torch.bfloat16]
ODDS = np.array([ODD**row & 0xFFFF for row in range(2)], np.uint16)
"""What the chance of each list of state is multiplied by."""

_INFINITY = 0x7F800000
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000
_DROPPED = 23 - MANTISSA  # bits
_BELOW_TOP = (1 << _DROPPED) - 1
_LEAST = LEAST
_WHOLE, _WHOLE_BITS = 1.5 * 2.0**23, 0x4B400000
"""Smaller numbers added to this are rounded to whole ones, halves to even, in its last bits."""
_SIGNED_TO_LOWEST = BINADES[Format.SIGNED] - 2
_UNSIGNED_TO_LOWEST = BINADES[Format.UNSIGNED] - 2

_Short, _Int, _Long, _Float = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class Layout(NamedTuple):
    """Of each tensor what tells where its elements are kept, and the chance of each."""

    rows: Any  # int64: elements of a row
    lengths: Any  # int64: elements of a block, zero where there are none
    numbers: Any  # uint32, see `Stored`
    starts: Any  # int64
    seed: Any  # uint32
    step: Any  # uint32
    by_chance: bool  # whether there is any chance


# -- one element ----------------------------------------------------------------------------------


def _power(builder: Any, field: Any) -> Any:
    """The power of two with this exponent field."""
    return builder.bitcast(builder.shl(field, _Int(23)), _Float)


def _at_least(builder: Any, value: Any, least: Any) -> Any:
    return builder.select(builder.icmp_signed("<", value, least), least, value)


@emitted(types.float32)
def join(builder, kinds, half, low):
    """The float32 value of a half weight and what is kept beside it."""
    low = builder.sext(low, _Int)
    if kinds[0] == types.int16:  # bfloat16, where nan stays one
        word = builder.zext(half, _Int)
        is_zero = builder.icmp_signed("==", builder.and_(word, _Int(0x7FFF)), _Int(0))
        low = builder.select(is_zero, _at_least(builder, low, _Int(0)), low)
        return builder.bitcast(builder.add(builder.shl(word, _Int(16)), low), _Float)
    bits = builder.bitcast(to_float(builder, half, kinds[0]), _Int)
    size = builder.bitcast(builder.and_(bits, _Int(_MAGNITUDE)), _Float)
    # In 2**-16 of a unit. Infinity and nan stay what they are.
    by = builder.sub(_unit_of(builder, bits), _Int(16 << 23))
    size = _exact(builder, builder.sitofp(low, _Float), builder.bitcast(by, _Float), size)
    # Below zero is only what lies beside a zero that a script has written.
    is_below = builder.fcmp_ordered("<", size, _Float(0.0))
    size = builder.bitcast(builder.select(is_below, _Float(0.0), size), _Int)
    return builder.bitcast(builder.or_(size, builder.and_(bits, _Int(_SIGN))), _Float)


def _exact(builder: Any, value: Any, power: Any, addend: Any) -> Any:
    """``value * power + addend``, fused where that is fast: the product is exact in any case."""
    kind = ir.FunctionType(_Float, [_Float] * 3)
    fused = builder.module.declare_intrinsic("llvm.fmuladd", [_Float], kind)
    return builder.call(fused, [value, power, addend])


def _unit_of(builder: Any, bits: Any) -> Any:
    """The bits of the unit in the last place of a finite float16, from those of its float32."""
    field = builder.and_(bits, _Int(_INFINITY))
    return builder.sub(_at_least(builder, field, _Int(113 << 23)), _Int(10 << 23))


@emitted(lambda value, zero: zero)
def half_of(builder, kinds, value, zero):
    """The half weight that a float32 value is split into."""
    if kinds[1] == types.int16:  # bfloat16
        word = builder.add(builder.bitcast(value, _Int), _Int(0x8000))
        return or_nan(builder, value, builder.lshr(word, _Int(16)), 0x7FC0)
    half, far = _nearest(builder, value)
    is_half_way = builder.icmp_signed("==", far, _Int(_WHOLE_BITS + (1 << 15)))
    return builder.add(half, builder.zext(is_half_way, _Short))


@emitted(types.int16)
def low_of(builder, kinds, value, zero):
    """What is kept beside it."""
    if kinds[1] == types.int16:  # bfloat16
        return or_nan(builder, value, builder.bitcast(value, _Int), 0)
    half, far = _nearest(builder, value)
    is_finite = builder.icmp_unsigned("<", builder.and_(half, _Short(0x7FFF)), _Short(0x7C00))
    # Half way it is 2**15, and of the next half weight, which is taken then, -2**15: the same
    # 16 bits. That one has the same unit, since only an even one is left for the next.
    return builder.trunc(builder.select(is_finite, far, _Int(0)), _Short)


def _nearest(builder: Any, value: Any) -> tuple[Any, Any]:
    """The nearest float16, and how much larger the magnitude is, in 2**-16 of a unit of it.

    That is a whole number above `_WHOLE_BITS`, of which the lower 16 bits are zero.
    """
    half = from_float(builder, value, types.uint16)
    wide = to_float(builder, half, types.uint16)
    bits = builder.bitcast(wide, _Int)
    # 2**16 / unit, of powers of two
    by = builder.sub(_Int((2 * 127 + 16) << 23), _unit_of(builder, bits))
    by = builder.bitcast(builder.or_(by, builder.and_(bits, _Int(_SIGN))), _Float)
    far = _exact(builder, builder.fsub(value, wide), by, _Float(_WHOLE))
    return half, builder.bitcast(far, _Int)


@emitted(types.uint16)
def times(builder, kinds, chance, by):
    """A product modulo 2**16."""
    return builder.mul(chance, by)


@emitted(types.int16)
def round_by_chance(builder, kinds, value, chance):
    """To bfloat16, away from zero if the chance says so."""
    word = builder.add(builder.bitcast(value, _Int), builder.zext(chance, _Int))
    return or_nan(builder, value, builder.lshr(word, _Int(16)), 0x7FC0)


@emitted(types.float32)
def decode(builder, kinds, code, lowest):
    """The value of a code of 8 bits in a finite block; ``lowest`` is its lowest exponent field."""
    whole = (builder.sext if kinds[0].signed else builder.zext)(code, _Int)
    lowest = builder.trunc(lowest, _Int)
    is_negative = builder.icmp_signed("<", whole, _Int(0))
    size = builder.select(is_negative, builder.neg(whole), whole)
    is_below = builder.icmp_signed("<", size, _Int(1 << MANTISSA))
    first = builder.shl(builder.sub(lowest, _Int(1)), _Int(MANTISSA))
    word = builder.shl(builder.add(size, first), _Int(_DROPPED))
    word = builder.select(is_below, builder.add(word, _Int(1 << 23)), word)
    value = builder.bitcast(word, _Float)
    below = builder.fsub(value, _power(builder, lowest))
    value = builder.select(is_below, below, value)
    return builder.select(is_negative, builder.fneg(value), value)


@emitted(lambda value, chance, lowest, zero: zero)
def encode(builder, kinds, value, chance, lowest, zero):
    """The code of a value in a finite block, of the type of ``zero``."""
    is_signed = kinds[3].signed
    binades = BINADES[Format.SIGNED if is_signed else Format.UNSIGNED]
    whole, lowest = builder.bitcast(value, _Int), builder.trunc(lowest, _Int)
    size = builder.and_(whole, _Int(_MAGNITUDE))
    below = builder.fadd(builder.bitcast(size, _Float), _power(builder, lowest))
    below = builder.sub(builder.bitcast(below, _Int), _Int(1 << 23))
    is_below = builder.icmp_signed("<", size, builder.shl(lowest, _Int(23)))
    word = builder.select(is_below, below, size)
    chance = builder.shl(builder.zext(chance, _Int), _Int(_DROPPED - 16))
    word = builder.lshr(builder.add(word, chance), _Int(_DROPPED))
    first = builder.shl(builder.sub(lowest, _Int(1)), _Int(MANTISSA))
    code, top = builder.sub(word, first), _Int((binades << MANTISSA) - 1)
    code = builder.select(builder.icmp_signed(">", code, top), top, code)
    if is_signed:
        is_negative = builder.icmp_signed("<", whole, _Int(0))
        code = builder.select(is_negative, builder.neg(code), code)
    else:
        is_above = builder.icmp_signed(">", size, _Int(0))
        code = _at_least(builder, code, builder.zext(is_above, _Int))
    return builder.trunc(code, ir.IntType(8))


@emitted(types.void)
def philox(builder, kinds, room, place, counter, given):
    """Put the 4 words of `preamp.kernels.stored.noise` at ``place``.

    ``given`` are the step, the seed and the number, uint32.
    """
    step, *key = (builder.zext(builder.extract_value(given, n), _Long) for n in range(3))
    words = [counter, builder.lshr(counter, _Long(32)), step, _Long(0)]
    target = builder.gep(builder.inttoptr(room, _Int.as_pointer()), [builder.mul(place, _Long(4))])
    for number, word in enumerate(_philox(builder, words, key)):
        builder.store(builder.trunc(word, _Int), builder.gep(target, [_Long(number)]))


def _philox(builder: Any, words: list[Any], key: list[Any]) -> list[Any]:
    # In 64 bits, of which the upper ones are anything: products are of the lower ones alone.
    for number in range(10):
        products = [
            builder.mul(_Long(by), builder.and_(words[place], _Long(0xFFFFFFFF)))
            for by, place in zip(MULTIPLIERS, (0, 2), strict=True)
        ]
        high = [builder.lshr(each, _Long(32)) for each in products]
        keys = [
            builder.add(part, _Long(number * by & 0xFFFFFFFF))
            for part, by in zip(key, WEYL, strict=True)
        ]
        words = [
            builder.xor(builder.xor(high[1], words[1]), keys[0]),
            products[1],
            builder.xor(builder.xor(high[0], words[3]), keys[1]),
            products[0],
        ]
    return words


# -- lists ----------------------------------------------------------------------------------------


@function
def unpack(place, kind, beside, tensor, begin, n, room, layout):
    """Put elements of a list that is kept in fewer bits in ``room``, as float32.

    ``place`` is where they are, ``beside`` where the lows, or the scales, of the tensor are.
    """
    if kind == _SPLIT_BF16:
        for i in range(n):
            poke(room, i, join(peek(place, i, _BF16), peek(beside, begin + i, _I16)))
    elif kind == _SPLIT_F16:
        for i in range(n):
            poke(room, i, join(peek(place, i, _F16), peek(beside, begin + i, _I16)))
    elif kind == _BY_CHANCE:
        for i in range(n):
            poke(room, i, f32_of_bits(np.uint32(np.uint32(peek(place, i, _U16)) << 16)))
    else:
        row, length = layout.rows[tensor], layout.lengths[tensor]
        column = begin % row
        block = begin // row * (-(-row // length)) + column // length
        first = 0
        while first < n:
            last = first + min(length, row - column)
            bits = np.int64(bits_of_f32(peek(beside, block, _F32)))
            field = bits >> 23
            if field == 255:
                for i in range(first, last):
                    poke(room, i, np.float32(np.nan))
            elif kind == _IS_SIGNED:
                lowest = max(field, _LEAST) - _SIGNED_TO_LOWEST
                for i in range(first, last):
                    poke(room, i, decode(peek(place, i, _I8), lowest))
            else:
                lowest = max(field, _LEAST) - _UNSIGNED_TO_LOWEST
                for i in range(first, last):
                    poke(room, i, decode(peek(place, i, _U8), lowest))
            column += last - first
            column = column if column < row else 0
            first, block = last, block + 1


@function
def pack(values, place, kind, beside, tensor, begin, n, chance, by, layout):
    """Keep elements that `unpack` has found.

    ``chance`` is where that of the first one is, see `chances`; it is taken times ``by``.
    """
    if kind == _SPLIT_BF16:
        for i in range(n):
            value = peek(values, i, _F32)
            poke(place, i, half_of(value, _BF16))
            poke(beside, begin + i, low_of(value, _BF16))
    elif kind == _SPLIT_F16:
        for i in range(n):
            value = peek(values, i, _F32)
            poke(place, i, half_of(value, _F16))
            poke(beside, begin + i, low_of(value, _F16))
    elif kind == _BY_CHANCE:
        for i in range(n):
            own = times(peek(chance, i, _U16), by)
            poke(place, i, round_by_chance(peek(values, i, _F32), own))
    else:
        row, length = layout.rows[tensor], layout.lengths[tensor]
        column = begin % row
        block = begin // row * (-(-row // length)) + column // length
        first = 0
        while first < n:
            last = first + min(length, row - column)
            top = magnitude(_F32)
            for i in range(first, last):
                top = higher(top, magnitude(peek(values, i, _F32)))
            largest = np.int64(top)
            if largest >= _INFINITY:
                poke(beside, block, f32_of_bits(top))
                for i in range(first, last):
                    poke(place, i, _U8)
            else:
                field = min(max((largest + _BELOW_TOP) >> 23, _LEAST), 254)
                poke(beside, block, f32_of_bits(np.uint32(field << 23)))
                if kind == _IS_SIGNED:
                    lowest = field - _SIGNED_TO_LOWEST
                    for i in range(first, last):
                        own = times(peek(chance, i, _U16), by)
                        poke(place, i, encode(peek(values, i, _F32), own, lowest, _I8))
                else:
                    lowest = field - _UNSIGNED_TO_LOWEST
                    for i in range(first, last):
                        own = times(peek(chance, i, _U16), by)
                        poke(place, i, encode(peek(values, i, _F32), own, lowest, _U8))
            column += last - first
            column = column if column < row else 0
            first, block = last, block + 1


@function
def chances(tensor, begin, n, room, layout):
    """Put the chance of elements in ``room``; returns where that of the first one is."""
    start = layout.starts[tensor] + begin
    first = start >> 3
    given = layout.step, layout.seed, layout.numbers[tensor]
    for place in range(((start + n + 7) >> 3) - first):
        philox(room, place, first + place, given)
    return room + 2 * (start - 8 * first)
