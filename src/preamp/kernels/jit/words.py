# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false
# pyright: reportMissingTypeStubs=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
"""What kernels do with one element: read it at an address, widen it, round it, store it.

A dtype that compiled code is to know comes as a zero of the type that elements are stored in;
bfloat16 is stored as int16 and float16 as uint16, which numba has. Kernels know the dtype of their
computation in this way. Others come as `CODES`, and elements of them pass through a block of memory
that stays in the cache: one machine code serves all dtypes, and takes a second to make.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic, overload

from preamp.kernels.jit.compiler import ALWAYS_INLINE, function, part

ZEROS: dict[torch.dtype, Any] = {
    torch.float16: np.uint16(0),
    torch.bfloat16: np.int16(0),
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
}
"""What stands for torch's dtypes where compiled code knows them."""

_NONE, _IS_F16, _IS_BF16, _IS_F32, _IS_F64 = range(5)
CODES: dict[torch.dtype | None, int] = {
    None: _NONE,
    torch.float16: _IS_F16,
    torch.bfloat16: _IS_BF16,
    torch.float32: _IS_F32,
    torch.float64: _IS_F64,
}
"""What stands for torch's dtypes where it does not; ``None`` for a list that is not there."""

_F16, _BF16 = types.uint16, types.int16
_WIDTHS = np.array([0, 2, 2, 4, 8])  # bytes of an element, by code
_LLVM: dict[Any, ir.Type] = {
    **{_F16: ir.IntType(16), _BF16: ir.IntType(16)},
    **{types.float32: ir.FloatType(), types.float64: ir.DoubleType()},
}


def _has_half_instructions() -> bool:
    """Whether the processor converts float16; LLVM would call a library for it that is not there.

    ``PREAMP_JIT_FP16=integer`` says that it does not.
    """
    if os.environ.get("PREAMP_JIT_FP16") == "integer":
        return False
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return True
    return binding.get_host_cpu_features().get("f16c", False)


HAS_HALF = _has_half_instructions()


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


def _same_bits(to: Any, of: Any) -> Any:
    def convert(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(to))

        return to(of), generate

    return intrinsic(convert)


f32_of_bits = _same_bits(types.float32, types.uint32)
bits_of_f32 = _same_bits(types.uint32, types.float32)
f64_of_bits = _same_bits(types.float64, types.uint64)
bits_of_f64 = _same_bits(types.uint64, types.float64)


@intrinsic
def _widen_in_hardware(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(_F16), generate


@intrinsic
def _round_in_hardware(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return _F16(types.float32), generate


@part
def _widen_in_integers(bits: Any) -> Any:
    word = np.uint32(bits)
    size = word & np.uint32(0x7FFF)
    # The exponent's bias is 112 less; infinity and nan have it once more.
    wide = (size << np.uint32(13)) + np.uint32(0x38000000)
    if size >= np.uint32(0x7C00):
        wide += np.uint32(0x38000000)
    value = f32_of_bits(wide)
    if size < np.uint32(0x400):  # subnormal: so many times the smallest
        value = np.float32(np.int32(size)) * np.float32(2.0**-24)
    return f32_of_bits(bits_of_f32(value) | ((word & np.uint32(0x8000)) << np.uint32(16)))


@part
def _round_in_integers(value: Any) -> Any:
    word = bits_of_f32(value)
    size = word & np.uint32(0x7FFFFFFF)
    # Half a unit in the last place, and one more where that place is odd
    odd = (size >> np.uint32(13)) & np.uint32(1)
    rounded = (size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
    if size < np.uint32(0x38800000):  # subnormal: the sum with 1/2 has the right last place
        rounded = bits_of_f32(f32_of_bits(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    if size >= np.uint32(0x477FF000):
        rounded = np.uint32(0x7C00)
    if size > np.uint32(0x7F800000):
        rounded = np.uint32(0x7E00)
    return np.uint16(rounded | ((word >> np.uint32(16)) & np.uint32(0x8000)))


_widen_f16 = _widen_in_hardware if HAS_HALF else _widen_in_integers
_round_f16 = _round_in_hardware if HAS_HALF else _round_in_integers


@part
def _round_bf16(value: Any) -> Any:
    word = bits_of_f32(value)
    odd = (word >> np.uint32(16)) & np.uint32(1)
    rounded = (word + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        rounded = np.uint32(0x7FC0)
    return np.int16(rounded)


# -- dtypes ---------------------------------------------------------------------------------------


def widen(raw, math):
    """What is stored as ``raw``, in the dtype of the computation."""


def narrow(value, kind):
    """``value`` rounded to nearest even, once, as it is stored.

    float64 goes to halves by way of float32, as in torch.
    """


def value_of(bits, kind):
    """The magnitude that has these bits, as float64."""


@overload(widen, jit_options=ALWAYS_INLINE)
def _widen(raw, math):
    wide = np.float64 if math == types.float64 else np.float32
    if raw == _F16:
        return lambda raw, math: wide(_widen_f16(raw))
    if raw == _BF16:
        return lambda raw, math: wide(f32_of_bits(np.uint32(np.uint16(raw)) << np.uint32(16)))
    return lambda raw, math: wide(raw)


@overload(narrow, jit_options=ALWAYS_INLINE)
def _narrow(value, kind):
    if kind == _F16:
        return lambda value, kind: _round_f16(np.float32(value))
    if kind == _BF16:
        return lambda value, kind: _round_bf16(np.float32(value))
    if kind == types.float32:
        return lambda value, kind: np.float32(value)
    return lambda value, kind: np.float64(value)


_MAGNITUDES = {_F16: _F16, _BF16: _F16, types.float32: types.uint32, types.float64: types.uint64}
_INFINITY = {
    **{_F16: 0x7C00, _BF16: 0x7F80},
    **{types.float32: 0x7F800000, types.float64: 0x7FF0000000000000},
}


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
def finite_or_zero(typing: Any, bits: Any, raw: Any) -> Any:
    """A magnitude if it is that of a finite value, else that of zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.IntType(bits.bitwidth)
        is_finite = builder.icmp_unsigned("<", args[0], whole(_INFINITY[raw]))
        return builder.select(is_finite, args[0], whole(0))

    return bits(bits, raw), generate


@intrinsic
def higher(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two magnitudes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return a(a, a), generate


@overload(value_of, jit_options=ALWAYS_INLINE)
def _value_of(bits, kind):
    if kind == _F16:
        return lambda bits, kind: np.float64(_widen_f16(np.uint16(bits)))
    if kind == _BF16:
        return lambda bits, kind: np.float64(f32_of_bits(np.uint32(bits) << np.uint32(16)))
    if kind == types.float32:
        return lambda bits, kind: np.float64(f32_of_bits(np.uint32(bits)))
    return lambda bits, kind: f64_of_bits(np.uint64(bits))


def is_own(kind, math):
    """Whether elements are stored in the dtype of the computation."""


@overload(is_own, jit_options=ALWAYS_INLINE)
def _is_own(kind, math):
    own = _IS_F64 if math == types.float64 else _IS_F32
    return lambda kind, math: kind == own


def memory(lists, elements, math):
    """Zeros of the dtype of the computation."""


@overload(memory, jit_options=ALWAYS_INLINE)
def _memory(lists, elements, math):
    dtype = np.float64 if math == types.float64 else np.float32
    return lambda lists, elements, math: np.zeros((lists, elements), dtype)


def itemsize(zero):
    """Bytes of an element that is stored as ``zero`` is."""


@overload(itemsize, jit_options=ALWAYS_INLINE)
def _itemsize(zero):
    size = zero.bitwidth // 8
    return lambda zero: size


@part
def place(at, row, tensor, start, kinds):
    """Where some elements of a tensor lie."""
    return at[row, tensor] + start * _WIDTHS[kinds[row]]


@part
def _widen_all(at, count, to, zero, math):
    for i in range(count):
        poke(to, i, widen(peek(at, i, zero), math))


@part
def _narrow_all(at, count, to, zero, math):
    for i in range(count):
        poke(to, i, narrow(peek(at, i, math), zero))


@function
def widened(at, kind, count, room, math):
    """Where ``count`` elements are in the dtype of the computation: at hand, or put in ``room``."""
    if kind == _NONE:
        return room
    if is_own(kind, math):
        return at
    if kind == _IS_BF16:
        _widen_all(at, count, room, np.int16(0), math)
    elif kind == _IS_F16:
        _widen_all(at, count, room, np.uint16(0), math)
    elif kind == _IS_F32:
        _widen_all(at, count, room, np.float32(0), math)
    else:
        _widen_all(at, count, room, np.float64(0), math)
    return room


@function
def put_back(values, at, kind, count, math):
    """Round elements that `widened` has put elsewhere into where they belong."""
    if values == at:
        return
    if kind == _NONE:
        return
    if kind == _IS_BF16:
        _narrow_all(values, count, at, np.int16(0), math)
    elif kind == _IS_F16:
        _narrow_all(values, count, at, np.uint16(0), math)
    elif kind == _IS_F32:
        _narrow_all(values, count, at, np.float32(0), math)
    else:
        _narrow_all(values, count, at, np.float64(0), math)


@function
def round_stored(at, kind, to, to_kind, count, room, math):
    """Round what is stored at one place into another list, if it is there."""
    if to_kind != _NONE:
        put_back(widened(at, kind, count, room, math), to, to_kind, count, math)


@intrinsic
def add(typing: Any, total: Any, value: Any) -> Any:
    """``total + value`` where the order of a sum does not matter: in as many lanes as there are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=("reassoc",))

    return total(total, total), generate
