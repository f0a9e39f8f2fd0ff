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

import inspect
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


def emitted(result: Any) -> Any:
    """An intrinsic: a function that emits LLVM's instructions for arguments as they come.

    It is given the builder, numba's types of the arguments, and their values. ``result`` is the
    type of what it returns, or makes that of the arguments' types. Functions in Python would take
    the compiler a good part of a second each.
    """

    def intrinsic_of(emit: Any) -> Any:
        def define(typing: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                found = emit(builder, kinds, *args)
                return context.get_dummy_value() if found is None else found

            returned = result if isinstance(result, types.Type) else result(*kinds)
            return returned(*kinds), generate

        own: Any = define
        own.__name__, own.__doc__ = emit.__name__, emit.__doc__
        signature = inspect.signature(emit)
        own.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return intrinsic(own)

    return intrinsic_of


# -- memory ---------------------------------------------------------------------------------------


def _place(builder: Any, address: Any, index: Any, stored: Any) -> Any:
    # One pointer for each loop and an index beside it: what LLVM needs to make vectors.
    return builder.gep(builder.inttoptr(address, _LLVM[stored].as_pointer()), [index])


@emitted(lambda address, index, zero: zero)
def peek(builder, kinds, address, index, zero):
    """The element ``index`` of the memory at ``address``, stored as ``zero`` is."""
    return builder.load(_place(builder, address, index, kinds[2]))


@emitted(types.void)
def poke(builder, kinds, address, index, value):
    """Store ``value``, of a type in which elements are stored."""
    builder.store(value, _place(builder, address, index, kinds[2]))


# -- bits -----------------------------------------------------------------------------------------

_I16, _I32, _I64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@emitted(types.float32)
def f32_of_bits(builder, kinds, bits):
    """The float32 value of a word."""
    return builder.bitcast(bits, _FLOAT)


@emitted(types.uint32)
def bits_of_f32(builder, kinds, value):
    """The word of a float32 value."""
    return builder.bitcast(value, _I32)


def to_float(builder: Any, raw: Any, kind: Any) -> Any:
    """An element of either half dtype as float32."""
    if kind == _BF16:
        word = builder.shl(builder.zext(raw, _I32), _I32(16))
        return builder.bitcast(word, _FLOAT)
    return builder.fpext(builder.bitcast(raw, ir.HalfType()), _FLOAT)


def from_float(builder: Any, value: Any, kind: Any) -> Any:
    """float32 rounded to either half dtype."""
    if kind == _F16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _I16)
    word = builder.bitcast(value, _I32)
    # Half a unit in the last place, and one more where that place is odd
    odd = builder.and_(builder.lshr(word, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(word, _I32(0x7FFF)), odd), _I32(16))
    return or_nan(builder, value, rounded, 0x7FC0)


def or_nan(builder: Any, value: Any, word: Any, of_nan: int) -> Any:
    """The low 16 bits of a word, or of what stands for nan where the value is that."""
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _I32(of_nan), word), _I16)


@emitted(types.float32)
def widen(builder, kinds, raw):
    """What is stored as ``raw``, in float32."""
    return raw if kinds[0] == types.float32 else to_float(builder, raw, kinds[0])


@emitted(lambda value, zero: zero)
def narrow(builder, kinds, value, zero):
    """A float32 value rounded to nearest even, once, as a half element is stored."""
    return from_float(builder, value, kinds[1])


@emitted(types.float32)
def taken_over(builder, kinds, value, half):
    """What a master and its half weight say: see `preamp.kernels.stored.taken_over`."""
    rounded = from_float(builder, value, kinds[1])
    other = to_float(builder, half, kinds[1])
    return builder.select(builder.icmp_signed("==", rounded, half), value, other)


_MAGNITUDES = {_F16: _F16, _BF16: _F16, types.float32: types.uint32}


@emitted(_MAGNITUDES.__getitem__)
def magnitude(builder, kinds, raw):
    """The bits of the magnitude, which are ordered as the magnitudes are, nan last.

    As wide as the element: numba's own operations would make 64 bits of them.
    """
    whole = ir.IntType(kinds[0].bitwidth)
    return builder.and_(builder.bitcast(raw, whole), whole(2 ** (whole.width - 1) - 1))


@emitted(lambda a, b: a)
def higher(builder, kinds, a, b):
    """The larger of two magnitudes."""
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


@emitted(types.float64)
def value_of(builder, kinds, bits, raw):
    """The magnitude that has these bits, as float64."""
    is_half = kinds[1] in (_F16, _BF16)
    value = to_float(builder, bits, kinds[1]) if is_half else builder.bitcast(bits, _FLOAT)
    return builder.fpext(value, ir.DoubleType())


@emitted(lambda total, value: total)
def add(builder, kinds, total, value):
    """``total + value`` where the order of a sum does not matter: in as many lanes as there are."""
    return builder.fadd(total, value, flags=("reassoc",))


@emitted(types.int64)
def itemsize(builder, kinds, zero):
    """Bytes of an element that is stored as ``zero`` is."""
    return _I64(kinds[0].bitwidth // 8)


# -- dtypes ---------------------------------------------------------------------------------------


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
