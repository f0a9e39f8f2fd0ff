# SPDX-License-Identifier: BSD-3-Clause
"""Gradient descent with momentum."""

from __future__ import annotations

import torch
import triton.language as tl

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import SgdRule, Update
from preamp.kernels.triton.launch import kernel, scalar
from preamp.kernels.triton.update import leave, places
from preamp.kernels.triton.walk import (
    BLOCK,
    address,
    address_of_half,
    bounds,
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
def _sgd(
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
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = read_scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    is_first = read_scalar(step, step_at, STEP_AT, MATH) == 1
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


@torch.no_grad()
def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    rule: SgdRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.sgd_`."""
    lists = (params, grads, momentum_buffers)
    taken, others = places(*lists, update=update)
    decays = rule.weight_decay != 0
    for part in taken:
        part.launch(
            _sgd,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.corrections(False),
            **part.numbers(
                momentum=rule.momentum,
                share=1 - rule.dampening,
                weight_decay=rule.weight_decay,
            ),
            HAS_MOMENTUM=rule.momentum != 0,
            NESTEROV=rule.nesterov,
            DECAYS_BEFORE=decays and not rule.decays_after_momentum,
            DECAYS_AFTER=decays and rule.decays_after_momentum,
        )
    leave(reference.sgd_, others, *lists, rule=rule, update=update)
