# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernel of Adagrad."""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import kernel
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_of_half,
    bounds,
    divide,
    factor_or_one,
    find_chunk,
    load,
    narrow,
    number,
    root,
    scalar,
    spared,
    store,
    store_param,
    whole_blocks,
)


@kernel
def adagrad_kernel(
    pointers,
    layout,
    n: tl.int64,
    lr: tl.int64,
    lr_at,
    eps: tl.int64,
    weight_decay: tl.int64,
    inv_scale_at,
    found_inf_at,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    MATH: tl.constexpr,
    LR_AT: tl.constexpr,
    INV_SCALE_AT: tl.constexpr,
    FOUND_INF_AT: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of an Adagrad update."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    sum_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    decay = number(weight_decay, MATH)
    whole = whole_blocks(p_at | g_at | sum_at | h_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            p = load(p_at, start, where, mask, EDGE, P, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            total = load(sum_at, start, where, mask, EDGE, M, MATH)
            if DECAYS and not DECOUPLED:
                g = g + decay * p
            total = total + g * g
            store(sum_at, start, where, mask, EDGE, M, narrow(total, M))
            direction = divide(g, root(total, MATH) + number(eps, MATH), MATH)
            if DECAYS and DECOUPLED:
                direction = direction + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * direction)
            first += BLOCK
