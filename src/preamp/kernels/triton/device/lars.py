# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernel of LARS."""

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
    scalar,
    spared,
    store,
    store_param,
    whole_blocks,
)


@kernel
def lars_kernel(
    pointers,
    layout,
    n: tl.int64,
    p_norms,
    g_norms,
    lr: tl.int64,
    lr_at,
    momentum: tl.int64,
    weight_decay: tl.int64,
    trust_coefficient: tl.int64,
    eps: tl.int64,
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
    NESTEROV: tl.constexpr,
    TRUST_RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of a LARS update; the norms are those of whole tensors."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    rate = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    decay = number(weight_decay, MATH)
    if TRUST_RATIO:
        p_norm = tl.load(p_norms + tensor)
        g_norm = tl.load(g_norms + tensor)
        ratio = divide(p_norm, g_norm + decay * p_norm + number(eps, MATH), MATH)
        ratio = number(trust_coefficient, MATH) * ratio
        rate = tl.where((p_norm > 0) & (g_norm > 0), rate * ratio, rate)
    whole = whole_blocks(p_at | g_at | m_at | h_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            p = load(p_at, start, where, mask, EDGE, P, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            m = load(m_at, start, where, mask, EDGE, M, MATH)
            change = rate * (g + decay * p)
            m = number(momentum, MATH) * m - change
            store(m_at, start, where, mask, EDGE, M, narrow(m, M))
            if NESTEROV:
                m = number(momentum, MATH) * m - change
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p + m)
            first += BLOCK
