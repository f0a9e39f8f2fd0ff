# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
"""Largest magnitudes and norms: per chunk, then per tensor.

Each sum is taken in a fixed order, so equal inputs give equal bits. Magnitudes are compared as
the integers that hold their bits: these grow with the value, infinity is above every number and
nan above infinity, so a maximum cannot lose either.
"""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import kernel
from preamp.kernels.triton.device.stored import load_param
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_if,
    bounds,
    factor_or_one,
    find_chunk,
    magnitude_bits,
    root,
    value_of_bits,
    whole_blocks,
)


@kernel
def measure_chunks(
    pointers, layout, n: tl.int64, partials, factor_at,
    X, ROW, H, H_ROW, FACTOR_AT, MAX, SUM, CHUNK, WIDTH,
):  # fmt: skip
    """Write the largest magnitude and the sum of squares of each chunk."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    at = address(pointers, n, ROW, tensor)
    factor = factor_or_one(factor_at, FACTOR_AT)
    h_at = address_if(pointers, n, H_ROW, tensor, H)
    whole = whole_blocks(at | h_at, count)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = magnitude_bits(squares)
    for AT_ONCE in tl.static_range(WIDTH, 0, 1 - WIDTH):  # and then one by one
        first, end = bounds(whole, count, AT_ONCE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            x = load_param(at, h_at, start, where, mask, AT_ONCE, X, H, H is not None)
            x = x * factor
            if MAX:
                largest = tl.maximum(largest, magnitude_bits(x))
            if SUM:
                squares += x * x
            first += BLOCK
    chunk = tl.program_id(0).to(tl.int64)
    if MAX:
        tl.store(partials + chunk, value_of_bits(tl.max(largest, 0)))
        partials += tl.num_programs(0)
    if SUM:
        tl.store(partials + chunk, tl.sum(squares, 0))


@kernel
def gather_kernel(pointers, layout, n: tl.int64, partials, results, found_inf, MAX, FOUND_INF):
    """Bring the partial results of one tensor together, at its position in ``results``."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(layout + n + tensor)
    last = tl.load(layout + n + tensor + 1)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = magnitude_bits(squares)
    while first < last:
        chunks = first + tl.arange(0, BLOCK)
        values = tl.load(partials + chunks, mask=chunks < last, other=0)
        if MAX:
            largest = tl.maximum(largest, magnitude_bits(values))
        else:
            squares += values
        first += BLOCK
    if MAX:
        result = value_of_bits(tl.max(largest, 0))
    else:
        result = root(tl.sum(squares, 0))
    position = tl.load(layout + 2 * n + 1 + tensor)
    tl.store(results + position, result)
    if FOUND_INF:
        if (result - result) != 0:  # nan for infinity and nan
            tl.store(found_inf, 1.0)  # whoever writes, writes the same
