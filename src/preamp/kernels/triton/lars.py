# SPDX-License-Identifier: BSD-3-Clause
"""LARS: two norms per tensor, then the update."""

from __future__ import annotations

import torch
import triton.language as tl

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import LarsRule, Update
from preamp.kernels.triton.launch import kernel, scalar
from preamp.kernels.triton.update import leave, places
from preamp.kernels.triton.walk import (
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
    spared,
    store,
    store_param,
    whole_blocks,
)
from preamp.kernels.triton.walk import (
    scalar as read_scalar,
)


@kernel
def _lars(
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
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    rate = read_scalar(lr, lr_at, LR_AT, MATH)
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


@torch.no_grad()
def lars_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: LarsRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lars_`."""
    lists = (params, grads, momentum_buffers)
    taken, others = places(*lists, update=update)
    for part in taken:
        p_norms = g_norms = part.entries.layout
        if rule.uses_trust_ratio:
            p_norms, g_norms = part.norms("P"), part.norms("G", update.inv_scale)
        part.launch(
            _lars,
            p_norms=p_norms,
            g_norms=g_norms,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.numbers(
                momentum=rule.momentum,
                weight_decay=rule.weight_decay,
                trust_coefficient=rule.trust_coefficient,
                eps=rule.eps,
            ),
            NESTEROV=rule.nesterov,
            TRUST_RATIO=rule.uses_trust_ratio,
        )
    leave(reference.lars_, others, *lists, rule=rule, update=update)
