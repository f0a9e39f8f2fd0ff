# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernel of Adam and AdamW."""

from __future__ import annotations

import triton.language as tl

from preamp.kernels.triton.device.jit import kernel
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_of_half,
    bounds,
    correction,
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
def adam_kernel(
    pointers,
    layout,
    n: tl.int64,
    lr: tl.int64,
    lr_at,
    step: tl.int64,
    step_at,
    beta1: tl.int64,
    beta1_left: tl.int64,
    beta2: tl.int64,
    beta2_left: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    correction1: tl.int64,
    correction2: tl.int64,
    inv_scale_at,
    found_inf_at,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    MATH: tl.constexpr,
    LR_AT: tl.constexpr,
    STEP_AT: tl.constexpr,
    INV_SCALE_AT: tl.constexpr,
    FOUND_INF_AT: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MOMENTS: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    EPS_INSIDE_SQRT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of an Adam update."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    v_at = address(pointers, n, 3, tensor)
    h_at = address_of_half(pointers, n, 4, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    c1 = correction(correction1, step_at, STEP_AT, MATH)
    c2 = correction(correction2, step_at, STEP_AT, MATH)
    if STEP_SIZE:
        size = divide(size * root(c2, MATH), c1, MATH)
    decay = number(weight_decay, MATH)
    whole = whole_blocks(p_at | g_at | m_at | v_at | h_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            p = load(p_at, start, where, mask, EDGE, P, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            m = load(m_at, start, where, mask, EDGE, M, MATH)
            v = load(v_at, start, where, mask, EDGE, V, MATH)
            if DECAYS and not DECOUPLED:
                g = g + decay * p
            m = number(beta1, MATH) * m + number(beta1_left, MATH) * g
            v = number(beta2, MATH) * v + number(beta2_left, MATH) * g * g
            store(m_at, start, where, mask, EDGE, M, narrow(m, M))
            store(v_at, start, where, mask, EDGE, V, narrow(v, V))
            if MOMENTS:
                m = divide(m, c1, MATH)
                v = divide(v, c2, MATH)
            if EPS_INSIDE_SQRT:
                direction = divide(m, root(v + number(eps, MATH), MATH), MATH)
            else:
                direction = divide(m, root(v, MATH) + number(eps, MATH), MATH)
            if DECAYS and DECOUPLED:
                direction = direction + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * direction)
            first += BLOCK
