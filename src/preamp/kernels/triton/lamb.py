# SPDX-License-Identifier: BSD-3-Clause
"""LAMB: the norms of parameter and update, then the update once more and its store."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import LambRule, Update
from preamp.kernels.triton.launch import kernel, scalar
from preamp.kernels.triton.reductions import gather
from preamp.kernels.triton.update import Places, leave, places
from preamp.kernels.triton.walk import (
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
    spared,
    store,
    store_param,
    whole_blocks,
)
from preamp.kernels.triton.walk import (
    scalar as read_scalar,
)


@kernel
def _lamb(
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
    rate = read_scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    if TRUST_RATIO and not MEASURE:
        p_norm = tl.load(norms + tensor)
        u_norm = tl.load(norms + n + tensor)
        ratio = divide(p_norm, u_norm, MATH)
        rate = tl.where((p_norm > 0) & (u_norm > 0), rate * ratio, rate)
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


@torch.no_grad()
def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: LambRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.lamb_`."""
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    taken, others = places(*lists, update=update)
    for part in taken:
        arguments = _arguments(rule, part)
        norms = part.empty(2, part.entries.count)
        if rule.uses_trust_ratio:
            partials = part.empty(2, part.entries.chunks)
            part.launch(_lamb, norms=partials, MEASURE=True, **arguments)
            for sums, results in zip(partials, norms, strict=True):
                gather(part.entries, sums, results, largest=False)
        part.launch(_lamb, norms=norms, MEASURE=False, **arguments)
    leave(reference.lamb_, others, *lists, rule=rule, update=update)


def _arguments(rule: LambRule, part: Places) -> dict[str, Any]:
    """What both launches of a part take."""
    return {
        **scalar("lr", rule.lr, part.entries, part.math),
        **part.corrections(rule.bias_correction, correction1=rule.beta1, correction2=rule.beta2),
        **part.numbers(
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
        "CORRECTS": rule.bias_correction,
        "TRUST_RATIO": rule.uses_trust_ratio,
    }
