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
from numba.extending import intrinsic

from preamp.kernels.jit.compiler import function
from preamp.kernels.jit.words import (
    CODES,
    ZEROS,
    bits_of_f32,
    f32_of_bits,
    from_float,
    higher,
    magnitude,
    peek,
    poke,
    to_float,
)
from preamp.kernels.stored import BINADES, LEAST, MANTISSA, MULTIPLIERS, WEYL, Format

# Codes of lists beside those of dtypes
_BY_CHANCE, _IS_SIGNED, _IS_UNSIGNED, _SPLIT_F16, _SPLIT_BF16 = range(len(CODES), len(CODES) + 5)
FORMATS = {Format.BFLOAT16: _BY_CHANCE, Format.SIGNED: _IS_SIGNED, Format.UNSIGNED: _IS_UNSIGNED}
SPLITS = {torch.float16: _SPLIT_F16, torch.bfloat16: _SPLIT_BF16}
"""By the dtype of half parameters with lows beside them."""

_F32, _I8, _U8, _I16, _U16 = np.float32(0), np.int8(0), np.uint8(0), np.int16(0), np.uint16(0)
_F16, _BF16 = ZEROS[torch.float16], ZEROS[torch.bfloat16]
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_BELOW_TOP = (1 << (23 - MANTISSA)) - 1
_LEAST = LEAST
_SIGNED_TO_LOWEST = BINADES[Format.SIGNED] - 2
_UNSIGNED_TO_LOWEST = BINADES[Format.UNSIGNED] - 2

_Int, _Long, _Float = ir.IntType(32), ir.IntType(64), ir.FloatType()


class Layout(NamedTuple):
    """Of each tensor what tells where its elements are kept, and the chance of each."""

    rows: Any  # int64: elements of a row
    lengths: Any  # int64: elements of a block, zero where there are none
    numbers: Any  # uint32, see `Stored`
    starts: Any  # int64
    seed: Any  # uint32
    step: Any  # uint32


# -- one element ----------------------------------------------------------------------------------


def _shifted_float(builder: Any, field: Any) -> Any:
    """The power of two with this exponent field."""
    return builder.bitcast(builder.shl(field, _Int(23)), _Float)


def _at_least(builder: Any, value: Any, least: Any) -> Any:
    return builder.select(builder.icmp_signed("<", value, least), least, value)


def _rounded(builder: Any, value: Any) -> Any:
    """To the nearest whole number, halves to the even one."""
    return builder.call(builder.module.declare_intrinsic("llvm.rint", [_Float]), [value])


@intrinsic
def join(typing: Any, half: Any, low: Any) -> Any:
    """The float32 value of a half weight and what is kept beside it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw, low = args[0], builder.sext(args[1], _Int)
        word = builder.zext(raw, _Int)
        size = builder.and_(word, _Int(0x7FFF))
        is_zero = builder.icmp_signed("==", size, _Int(0))
        was_written = builder.and_(is_zero, builder.icmp_signed("<", low, _Int(0)))
        low = builder.select(was_written, _Int(0), low)
        if half == types.int16:  # bfloat16
            is_nan = builder.icmp_signed(">", size, _Int(_INFINITY >> 16))
            low = builder.select(is_nan, _Int(0), low)
            return builder.bitcast(builder.add(builder.shl(word, _Int(16)), low), _Float)
        wide = to_float(context, builder, raw, half)
        whole = builder.bitcast(wide, _Int)
        bits = builder.and_(whole, _Int(_MAGNITUDE))
        far = builder.fmul(builder.sitofp(low, _Float), _Float(2.0**-16))
        far = builder.fmul(far, _unit_of(builder, bits))
        found = builder.bitcast(builder.fadd(builder.bitcast(bits, _Float), far), _Int)
        sign = builder.and_(whole, _Int(0x80000000))
        found = builder.or_(builder.and_(found, _Int(_MAGNITUDE)), sign)
        is_finite = builder.icmp_signed("<", size, _Int(0x7C00))
        return builder.bitcast(builder.select(is_finite, found, whole), _Float)

    return types.float32(half, low), generate


def _unit_of(builder: Any, bits: Any) -> Any:
    """See `preamp.kernels.stored`; of the bits of a magnitude."""
    field = _at_least(builder, builder.lshr(bits, _Int(23)), _Int(113))
    field = builder.select(builder.icmp_signed(">", field, _Int(142)), _Int(142), field)
    return _shifted_float(builder, builder.sub(field, _Int(10)))


@intrinsic
def half_of(typing: Any, value: Any, zero: Any) -> Any:
    """The half weight that a float32 value is split into."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], _Int)
        if zero == types.int16:  # bfloat16
            high = builder.lshr(builder.add(word, _Int(0x8000)), _Int(16))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.trunc(builder.select(is_nan, _Int(0x7FC0), high), ir.IntType(16))
        half = from_float(context, builder, args[0], zero)
        far = _rounded(builder, _distance(context, builder, word, half))
        is_half_way = builder.fcmp_ordered("==", far, _Float(2.0**15))
        return builder.add(half, builder.zext(is_half_way, ir.IntType(16)))

    return zero(value, zero), generate


@intrinsic
def low_of(typing: Any, value: Any, half: Any) -> Any:
    """What is kept beside the half weight that `half_of` has found."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], _Int)
        if half == types.int16:  # bfloat16
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.trunc(builder.select(is_nan, _Int(0), word), ir.IntType(16))
        far = _rounded(builder, _distance(context, builder, word, args[1]))
        size = builder.and_(args[1], ir.IntType(16)(0x7FFF))
        is_finite = builder.icmp_unsigned("<", size, ir.IntType(16)(0x7C00))
        whole = builder.fptosi(builder.select(is_finite, far, _Float(0.0)), _Int)
        return builder.trunc(whole, ir.IntType(16))

    return types.int16(value, half), generate


def _distance(context: Any, builder: Any, word: Any, half: Any) -> Any:
    """How much larger the magnitude is than that of a float16, in 2**-16 of a unit of this."""
    wide = builder.bitcast(to_float(context, builder, half, types.uint16), _Int)
    size, bits = (builder.and_(each, _Int(_MAGNITUDE)) for each in (word, wide))
    far = builder.fsub(builder.bitcast(size, _Float), builder.bitcast(bits, _Float))
    unit = builder.bitcast(_unit_of(builder, bits), _Int)
    # 2**16 / unit, of powers of two
    by = builder.sub(_Int((2 * 127 + 16) << 23), unit)
    return builder.fmul(far, builder.bitcast(by, _Float))


@intrinsic
def round_by_chance(typing: Any, value: Any, chance: Any) -> Any:
    """To bfloat16, away from zero if the chance says so."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], _Int)
        rounded = builder.lshr(builder.add(word, builder.zext(args[1], _Int)), _Int(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, _Int(0x7FC0), rounded), ir.IntType(16))

    return types.int16(value, chance), generate


@intrinsic
def decode(typing: Any, code: Any, lowest: Any, spoiled: Any) -> Any:
    """The value of a code of 8 bits; ``spoiled`` is nan in a block that is not finite, or zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code_, lowest, spoiled = args
        whole = (builder.sext if code.signed else builder.zext)(code_, _Int)
        is_below = builder.icmp_signed("<", whole, _Int(0))
        size = builder.select(is_below, builder.neg(whole), whole)
        power = _at_least(builder, builder.lshr(size, _Int(MANTISSA)), _Int(1))
        power = builder.sub(power, _Int(1))
        steps = builder.sub(size, builder.shl(power, _Int(MANTISSA)))
        field = builder.sub(builder.add(power, builder.trunc(lowest, _Int)), _Int(MANTISSA))
        value = builder.fmul(builder.sitofp(steps, _Float), _shifted_float(builder, field))
        value = builder.fadd(value, spoiled)
        return builder.select(is_below, builder.fneg(value), value)

    return types.float32(code, types.int64, types.float32), generate


@intrinsic
def encode(typing: Any, value: Any, chance: Any, lowest: Any, zero: Any) -> Any:
    """The code of a value in a finite block."""
    binades = BINADES[Format.SIGNED if zero.signed else Format.UNSIGNED]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, lowest = builder.bitcast(args[0], _Int), builder.trunc(args[2], _Int)
        size = builder.and_(word, _Int(_MAGNITUDE))
        power = _at_least(builder, builder.lshr(size, _Int(23)), lowest)
        by = _shifted_float(builder, builder.sub(_Int(MANTISSA + 254), power))
        steps = builder.fmul(builder.bitcast(size, _Float), by)
        chance = builder.uitofp(builder.zext(args[1], _Int), _Float)
        steps = builder.fadd(steps, builder.fmul(chance, _Float(2.0**-16)))
        first = builder.shl(builder.sub(power, lowest), _Int(MANTISSA))
        code = builder.add(builder.fptosi(steps, _Int), first)
        top = _Int((binades << MANTISSA) - 1)
        code = builder.select(builder.icmp_signed(">", code, top), top, code)
        if zero.signed:
            code = builder.select(builder.icmp_signed("<", word, _Int(0)), builder.neg(code), code)
        else:
            is_above = builder.icmp_signed(">", size, _Int(0))
            code = _at_least(builder, code, builder.zext(is_above, _Int))
        return builder.trunc(code, ir.IntType(8))

    return zero(value, chance, types.int64, zero), generate


@intrinsic
def philox(typing: Any, room: Any, place: Any, counter: Any, given: Any) -> Any:
    """Put the 4 words of `preamp.kernels.stored.noise` at ``place``.

    ``given`` are the step, the row, the seed and the number, uint32.
    """
    words = types.UniTuple(types.uint32, 4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room, place, counter, given = args
        step, row, *key = (builder.extract_value(given, each) for each in range(4))
        low = builder.trunc(counter, _Int)
        high = builder.trunc(builder.lshr(counter, _Long(32)), _Int)
        target = builder.gep(
            builder.inttoptr(room, _Int.as_pointer()), [builder.mul(place, _Long(4))]
        )
        for number, word in enumerate(_philox(builder, [low, high, step, row], key)):
            builder.store(word, builder.gep(target, [_Long(number)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, words), generate


def _philox(builder: Any, words: list[Any], key: list[Any]) -> list[Any]:
    for number in range(10):
        products = [
            builder.mul(_Long(by), builder.zext(words[place], _Long))
            for by, place in zip(MULTIPLIERS, (0, 2), strict=True)
        ]
        high = [builder.trunc(builder.lshr(each, _Long(32)), _Int) for each in products]
        low = [builder.trunc(each, _Int) for each in products]
        keys = [
            builder.add(part, _Int(number * by & 0xFFFFFFFF))
            for part, by in zip(key, WEYL, strict=True)
        ]
        words = [
            builder.xor(builder.xor(high[1], words[1]), keys[0]),
            low[1],
            builder.xor(builder.xor(high[0], words[3]), keys[1]),
            low[0],
        ]
    return words


# -- lists ----------------------------------------------------------------------------------------


@function
def end_of_piece(begin, last, most, tensor, layout):
    """Where whole blocks end that are at hand together, ``most`` elements at most."""
    end = begin + most
    if end >= last:
        return last
    length = layout.lengths[tensor]
    if length:
        end -= end % layout.rows[tensor] % length
    return end


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
            spoiled = np.float32(0.0 if field < 255 else np.nan)
            if kind == _IS_SIGNED:
                lowest = max(field, _LEAST) - _SIGNED_TO_LOWEST
                for i in range(first, last):
                    poke(room, i, decode(peek(place, i, _I8), lowest, spoiled))
            else:
                lowest = max(field, _LEAST) - _UNSIGNED_TO_LOWEST
                for i in range(first, last):
                    poke(room, i, decode(peek(place, i, _U8), lowest, spoiled))
            column += last - first
            column = column if column < row else 0
            first, block = last, block + 1


@function
def pack(values, place, kind, beside, list_, tensor, begin, n, room, layout):
    """Keep elements that `unpack` has found, of the list of state ``list_``.

    ``room`` is for chance.
    """
    if kind == _SPLIT_BF16:
        for i in range(n):
            value = peek(values, i, _F32)
            poke(place, i, half_of(value, _BF16))
            poke(beside, begin + i, low_of(value, _BF16))
        return
    if kind == _SPLIT_F16:
        for i in range(n):
            value = peek(values, i, _F32)
            half = half_of(value, _F16)
            poke(place, i, half)
            poke(beside, begin + i, low_of(value, half))
        return
    chance = chances(list_, tensor, begin, n, room, layout)
    if kind == _BY_CHANCE:
        for i in range(n):
            poke(place, i, round_by_chance(peek(values, i, _F32), peek(chance, i, _U16)))
    else:
        encode_blocks(values, place, kind, beside, tensor, begin, n, chance, layout)


@function
def chances(list_, tensor, begin, n, room, layout):
    """Put the chance of elements in ``room``; returns where that of the first one is."""
    start = layout.starts[tensor] + begin
    first = start >> 3
    given = layout.step, np.uint32(list_), layout.seed, layout.numbers[tensor]
    for place in range(((start + n + 7) >> 3) - first):
        philox(room, place, first + place, given)
    return room + 2 * (start - 8 * first)


@function
def encode_blocks(values, place, kind, beside, tensor, begin, n, chance, layout):
    """Keep elements in 8 bits, and the scales of their blocks."""
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
                    code = encode(peek(values, i, _F32), peek(chance, i, _U16), lowest, _I8)
                    poke(place, i, code)
            else:
                lowest = field - _UNSIGNED_TO_LOWEST
                for i in range(first, last):
                    code = encode(peek(values, i, _F32), peek(chance, i, _U16), lowest, _U8)
                    poke(place, i, code)
        column += last - first
        column = column if column < row else 0
        first, block = last, block + 1
