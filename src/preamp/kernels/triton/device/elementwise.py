# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
"""The kernels of linear combinations, and of splitting and joining."""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import kernel
from preamp.kernels.triton.device.stored import load_param, store_split
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_if,
    bounds,
    find_chunk,
    load,
    load_one,
    narrow,
    scalar,
    store,
    whole_blocks,
)


@kernel
def combine_kernel(
    pointers, layout, n: tl.int64, a: tl.int64, a_at, b: tl.int64, b_at,
    T, X, Y, A_AT, B_AT, A_EACH, CHUNK, WIDTH,
):  # fmt: skip
    """``target = a * x + b * y``; rows: targets, xs, ys if any, factors if ``A_EACH``."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    target_at = address(pointers, n, 0, tensor)
    x_at = address(pointers, n, 1, tensor)
    y_at = x_at
    if Y is not None:
        y_at = address(pointers, n, 2, tensor)
    if A_EACH:
        factor = load_one(address(pointers, n, A_EACH, tensor), tl.float32)
    else:
        factor = scalar(a, a_at, A_AT)
    whole = whole_blocks(target_at | x_at | y_at, count)
    for AT_ONCE in tl.static_range(WIDTH, 0, 1 - WIDTH):  # and then one by one
        first, end = bounds(whole, count, AT_ONCE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            result = load(x_at, start, where, mask, AT_ONCE, X) * factor
            if Y is not None:
                y = load(y_at, start, where, mask, AT_ONCE, Y)
                result = result + y * scalar(b, b_at, B_AT)
            store(target_at, start, where, mask, AT_ONCE, T, narrow(result, T))
            first += BLOCK


@kernel
def convert_kernel(pointers, layout, n: tl.int64, P, H, HOW, CHUNK, WIDTH):
    """Split float32 values (``HOW`` 0), join them (1), or take over what half weights say (2).

    Rows: these, then halves, and low bits if ``H``; of masters that take over, half weights alone.
    """
    tensor, start, count = find_chunk(layout, n, CHUNK)
    x_at = address(pointers, n, 0, tensor)
    p_at = x_at
    h_at = address_if(pointers, n, 1, tensor, H)
    if HOW < 2:
        p_at = address(pointers, n, 1, tensor)
        h_at = address_if(pointers, n, 2, tensor, H)
    whole = whole_blocks(x_at | p_at | h_at, count)
    for AT_ONCE in tl.static_range(WIDTH, 0, 1 - WIDTH):  # and then one by one
        first, end = bounds(whole, count, AT_ONCE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            if HOW:
                x = load_param(p_at, h_at, start, where, mask, AT_ONCE, P, H, HOW == 2)
                store(x_at, start, where, mask, AT_ONCE, tl.float32, x)
            else:
                x = load(x_at, start, where, mask, AT_ONCE, tl.float32)
                store_split(p_at, h_at, start, where, mask, AT_ONCE, P, H, x)
            first += BLOCK
