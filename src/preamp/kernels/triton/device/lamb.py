# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernel of LAMB."""

from __future__ import annotations

import triton
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


@triton.jit
def trusted(rate, norms, n, MATH: tl.constexpr):
    """The rate times the ratio of the two norms, alone where one of them is zero."""
    p_norm = tl.load(norms)
    u_norm = tl.load(norms + n)
    ratio = divide(p_norm, u_norm, MATH)
    return tl.where((p_norm > 0) & (u_norm > 0), rate * ratio, rate)


@kernel
def lamb_kernel(
    pointers,
    layout,
    n: tl.int64,
    norms,
    lr: tl.int64,
    lr_at,
    step: tl.int64,
    step_at,
    beta1: tl.int64,
    beta3: tl.int64,
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
    CORRECTS: tl.constexpr,
    TRUST_RATIO: tl.constexpr,
    MEASURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write sums of squares of a chunk's parameters and steps to ``norms``, or take the steps.

    Measuring stores nothing else: steps that are computed twice from the same state are equal,
    whatever dtype the state is rounded to.
    """
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    v_at = address(pointers, n, 3, tensor)
    h_at = address_of_half(pointers, n, 4, tensor, H)
    rate = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    if TRUST_RATIO and not MEASURE:
        rate = trusted(rate, norms + tensor, n, MATH)
    c1 = correction(correction1, step_at, STEP_AT, MATH)
    c2 = correction(correction2, step_at, STEP_AT, MATH)
    decay = number(weight_decay, MATH)
    p_squares = tl.zeros([BLOCK], MATH)
    u_squares = tl.zeros([BLOCK], MATH)
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
            m = number(beta1, MATH) * m + number(beta3, MATH) * g
            v = number(beta2, MATH) * v + number(beta2_left, MATH) * g * g
            if not MEASURE:
                store(m_at, start, where, mask, EDGE, M, narrow(m, M))
                store(v_at, start, where, mask, EDGE, V, narrow(v, V))
            if CORRECTS:
                m = divide(m, c1, MATH)
                v = divide(v, c2, MATH)
            u = divide(m, root(v, MATH) + number(eps, MATH), MATH)
            if DECAYS and DECOUPLED:
                u = u + decay * p
            if MEASURE:
                u = tl.where(mask, u, 0)  # without eps it is nan beyond the end
                p_squares += p * p
                u_squares += u * u
            else:
                store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - rate * u)
            first += BLOCK
    if MEASURE:
        partial = norms + tl.program_id(0).to(tl.int64)
        tl.store(partial, tl.sum(p_squares, 0))
        tl.store(partial + tl.num_programs(0), tl.sum(u_squares, 0))
