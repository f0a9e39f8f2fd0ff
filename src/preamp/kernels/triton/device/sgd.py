# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernel of gradient descent with momentum."""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import kernel
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_of_half,
    bounds,
    factor_or_one,
    find_chunk,
    load,
    narrow,
    number,
    scalar,
    spared,
    store,
    store_param,
    whole_blocks,
)


@kernel
def sgd_kernel(
    pointers,
    layout,
    n: tl.int64,
    lr: tl.int64,
    lr_at,
    step: tl.int64,
    step_at,
    momentum: tl.int64,
    share: tl.int64,
    weight_decay: tl.int64,
    inv_scale_at,
    found_inf_at,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    MATH: tl.constexpr,
    LR_AT: tl.constexpr,
    STEP_AT: tl.constexpr,
    INV_SCALE_AT: tl.constexpr,
    FOUND_INF_AT: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAYS_BEFORE: tl.constexpr,
    DECAYS_AFTER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of a step of gradient descent."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    is_first = scalar(step, step_at, STEP_AT, MATH) == 1
    decay = number(weight_decay, MATH)
    whole = whole_blocks(p_at | g_at | m_at | h_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            p = load(p_at, start, where, mask, EDGE, P, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            if DECAYS_BEFORE:
                g = g + decay * p
            if HAS_MOMENTUM:
                m = load(m_at, start, where, mask, EDGE, M, MATH)
                later = number(momentum, MATH) * m + number(share, MATH) * g
                m = tl.where(is_first, g, later)
                store(m_at, start, where, mask, EDGE, M, narrow(m, M))
                if NESTEROV:
                    g = g + number(momentum, MATH) * m
                else:
                    g = m
            if DECAYS_AFTER:
                g = g + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * g)
            first += BLOCK
