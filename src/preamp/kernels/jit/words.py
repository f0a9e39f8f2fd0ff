# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""What kernels do with one element: read it at an address, widen it, round it, store it.

A dtype that compiled code is to know comes as a zero of the type that elements are stored in;
bfloat16 is stored as int16 and float16 as uint16, which numba has. All is computed in float32.
Other dtypes come as `CODES`, and elements of them pass through a block of memory
that stays in the cache: one machine code serves all dtypes, and takes a second to make.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from preamp.kernels.jit.compiler import function

ZEROS: dict[torch.dtype, Any] = {
    torch.float16: np.uint16(0),
    torch.bfloat16: np.int16(0),
    torch.float32: np.float32(0),
}
"""What stands for torch's dtypes where compiled code knows them."""

_NONE, _IS_F16, _IS_BF16, _IS_F32 = range(4)
CODES: dict[torch.dtype | None, int] = {
    None: _NONE,
    torch.float16: _IS_F16,
    torch.bfloat16: _IS_BF16,
    torch.float32: _IS_F32,
}
"""What stands for torch's dtypes where it does not; ``None`` for a list that is not there."""

_ZERO_F16, _ZERO_BF16, _F32 = ZEROS.values()
_F16, _BF16 = types.uint16, types.int16
WIDTHS = np.array([0, 2, 2, 4, 2, 1, 1, 2, 2])
"""Bytes of an element, by code; those of dtypes, then those of `preamp.kernels.jit.formats`."""
_LLVM: dict[Any, ir.Type] = {
    **{_F16: ir.IntType(16), _BF16: ir.IntType(16)},
    **{types.float32: ir.FloatType(), types.int8: ir.IntType(8), types.uint8: ir.IntType(8)},
}


# -- memory ---------------------------------------------------------------------------------------


def _place(builder: Any, address: Any, index: Any, stored: Any) -> Any:
    # One pointer for each loop and an index beside it: what LLVM needs to make vectors.
    return builder.gep(builder.inttoptr(address, _LLVM[stored].as_pointer()), [index])


@intrinsic
def peek(typing: Any, address: Any, index: Any, kind: Any) -> Any:
    """The element ``index`` of the memory at ``address``, as stored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_place(builder, args[0], args[1], kind))

    return kind(types.int64, types.int64, kind), generate


@intrinsic
def poke(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Store ``value``, of a type in which elements are stored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _place(builder, args[0], args[1], value))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


# -- bits -----------------------------------------------------------------------------------------
#
# Intrinsics, since each function in Python takes the compiler a good part of a second.


def _same_bits(to: Any, of: Any) -> Any:
    def convert(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(to))

        return to(of), generate

    return intrinsic(convert)


f32_of_bits = _same_bits(types.float32, types.uint32)
bits_of_f32 = _same_bits(types.uint32, types.float32)


_I32, _FLOAT = ir.IntType(32), ir.FloatType()


def to_float(builder: Any, raw: Any, kind: Any) -> Any:
    """An element of either half dtype as float32."""
    if kind == _BF16:
        word = builder.shl(builder.zext(raw, _I32), _I32(16))
        return builder.bitcast(word, _FLOAT)
    return builder.fpext(builder.bitcast(raw, ir.HalfType()), _FLOAT)


def from_float(builder: Any, value: Any, kind: Any) -> Any:
    """float32 rounded to either half dtype."""
    if kind == _F16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    word = builder.bitcast(value, _I32)
    # Half a unit in the last place, and one more where that place is odd
    odd = builder.and_(builder.lshr(word, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(word, _I32(0x7FFF)), odd), _I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), ir.IntType(16))


@intrinsic
def widen(typing: Any, raw: Any) -> Any:
    """What is stored as ``raw``, in float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_half = raw in (_F16, _BF16)
        return to_float(builder, args[0], raw) if is_half else args[0]

    return types.float32(raw), generate


@intrinsic
def narrow(typing: Any, value: Any, zero: Any) -> Any:
    """A float32 value rounded to nearest even, once, as a half element is stored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return from_float(builder, args[0], zero)

    return zero(value, zero), generate


@intrinsic
def taken_over(typing: Any, value: Any, half: Any) -> Any:
    """What a master and its half weight say: see `preamp.kernels.stored.taken_over`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = from_float(builder, args[0], half)
        other = to_float(builder, args[1], half)
        return builder.select(builder.icmp_signed("==", rounded, args[1]), args[0], other)

    return value(value, half), generate


_MAGNITUDES = {_F16: _F16, _BF16: _F16, types.float32: types.uint32}


@intrinsic
def magnitude(typing: Any, raw: Any) -> Any:
    """The bits of the magnitude, which are ordered as the magnitudes are, nan last.

    As wide as the element: numba's own operations would make 64 bits of them.
    """
    bits = _MAGNITUDES[raw]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.IntType(bits.bitwidth)
        return builder.and_(builder.bitcast(args[0], whole), whole(2 ** (bits.bitwidth - 1) - 1))

    return bits(raw), generate


@intrinsic
def higher(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two magnitudes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return a(a, a), generate


@intrinsic
def value_of(typing: Any, bits: Any, raw: Any) -> Any:
    """The magnitude that has these bits, as float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, kind = args[0], raw
        if kind in (_F16, _BF16):
            value, kind = to_float(builder, value, kind), types.float32
        value = builder.bitcast(value, context.get_value_type(kind))
        return context.cast(builder, value, kind, types.float64)

    return types.float64(bits, raw), generate


# -- dtypes ---------------------------------------------------------------------------------------


@intrinsic
def itemsize(typing: Any, zero: Any) -> Any:
    """Bytes of an element that is stored as ``zero`` is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, zero.bitwidth // 8)

    return types.int64(zero), generate


@function
def widened(at, kind, count, room):
    """Where ``count`` elements are as float32: at hand, or put in ``room``."""
    if kind == _IS_BF16:
        for i in range(count):
            poke(room, i, widen(peek(at, i, _ZERO_BF16)))
    elif kind == _IS_F16:
        for i in range(count):
            poke(room, i, widen(peek(at, i, _ZERO_F16)))
    elif kind == _IS_F32:
        return at
    return room


@function
def put_back(values, at, kind, count):
    """Round elements that `widened` has put elsewhere into where they belong."""
    if values == at:
        return
    if kind == _IS_BF16:
        for i in range(count):
            poke(at, i, narrow(peek(values, i, _F32), _ZERO_BF16))
    elif kind == _IS_F16:
        for i in range(count):
            poke(at, i, narrow(peek(values, i, _F32), _ZERO_F16))
    elif kind == _IS_F32:
        for i in range(count):
            poke(at, i, peek(values, i, _F32))


@function
def take_over(masters, halves, kind, count):
    """Let masters say what half weights of a dtype do, in place."""
    if kind == _IS_BF16:
        for i in range(count):
            poke(masters, i, taken_over(peek(masters, i, _F32), peek(halves, i, _ZERO_BF16)))
    elif kind == _IS_F16:
        for i in range(count):
            poke(masters, i, taken_over(peek(masters, i, _F32), peek(halves, i, _ZERO_F16)))


@intrinsic
def add(typing: Any, total: Any, value: Any) -> Any:
    """``total + value`` where the order of a sum does not matter: in as many lanes as there are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=("reassoc",))

    return total(total, total), generate
