# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The kernels of NovoGrad."""

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
    load_one,
    narrow,
    number,
    root,
    scalar,
    spared,
    store,
    store_one,
    store_param,
    whole_blocks,
)


@kernel
def average_norms(
    pointers,
    layout,
    n: tl.int64,
    norms,
    averages,
    beta2: tl.int64,
    beta2_left: tl.int64,
    found_inf_at,
    N: tl.constexpr,
    ROW: tl.constexpr,
    MATH: tl.constexpr,
    FOUND_INF_AT: tl.constexpr,
    USES_MAX: tl.constexpr,
):
    """Blend the norm of one gradient into its average, unrounded for the update that follows."""
    tensor = tl.program_id(0).to(tl.int64)
    at = address(pointers, n, ROW, tensor)
    norm = tl.load(norms + tensor)
    v = load_one(at, N, MATH)
    if USES_MAX:
        blend = number(beta2, MATH) * v + number(beta2_left, MATH) * norm
    else:
        blend = number(beta2, MATH) * v * v + number(beta2_left, MATH) * norm * norm
        blend = root(blend, MATH)
    blend = tl.where(v < 0, norm, blend)
    tl.store(averages + tensor, blend)
    if spared(1, found_inf_at, FOUND_INF_AT) == 1:  # older interpreters store scalars unmasked
        store_one(at, N, blend)


@kernel
def novograd_kernel(
    pointers,
    layout,
    n: tl.int64,
    averages,
    lr: tl.int64,
    lr_at,
    step: tl.int64,
    step_at,
    beta1: tl.int64,
    beta3: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    correction1: tl.int64,
    correction2: tl.int64,
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
    INSIDE_MOMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of a NovoGrad update; ``averages`` is what `average_norms` wrote."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    decay = number(weight_decay, MATH)
    c1 = correction(correction1, step_at, STEP_AT, MATH)
    c2 = correction(correction2, step_at, STEP_AT, MATH)
    denominator = divide(tl.load(averages + tensor), root(c2, MATH), MATH) + number(eps, MATH)
    whole = whole_blocks(p_at | g_at | m_at | h_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            p = load(p_at, start, where, mask, EDGE, P, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            m = load(m_at, start, where, mask, EDGE, M, MATH)
            if INSIDE_MOMENT:
                g = divide(g, denominator, MATH) + decay * p
            m = number(beta1, MATH) * m + number(beta3, MATH) * g
            store(m_at, start, where, mask, EDGE, M, narrow(m, M))
            direction = divide(m, c1, MATH)
            if not INSIDE_MOMENT:
                direction = divide(direction, denominator, MATH) + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * direction)
            first += BLOCK
