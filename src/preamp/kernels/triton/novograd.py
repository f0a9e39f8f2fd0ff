# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad: the norm of each gradient, its moving average, then the update."""

from __future__ import annotations

import torch
import triton.language as tl

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import NovoGradRule, Update
from preamp.kernels.triton.launch import KINDS, given, kernel, launch, scalar
from preamp.kernels.triton.update import leave, places
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
    load_one,
    narrow,
    number,
    root,
    spared,
    store,
    store_one,
    store_param,
    whole_blocks,
)
from preamp.kernels.triton.walk import (
    scalar as read_scalar,
)


@kernel
def _average_norms(
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
    store_one(at, N, blend, spared(1, found_inf_at, FOUND_INF_AT) == 1)


@kernel
def _novograd(
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
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = read_scalar(lr, lr_at, LR_AT, MATH)
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


@torch.no_grad()
def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensors,
    *,
    rule: NovoGradRule,
    update: Update,
) -> None:
    """See `preamp.kernels.ops.Ops.novograd_`."""
    taken, others = places(params, grads, exp_avgs, update=update, norms=norms)
    for part in taken:
        measured = (part.max_norms if rule.uses_max_norm else part.norms)("G", update.inv_scale)
        averages = torch.empty_like(measured)
        launch(
            _average_norms,
            (part.entries.count,),
            part.entries,
            norms=measured,
            averages=averages,
            **part.numbers(beta2=rule.beta2, beta2_left=1 - rule.beta2),
            **given("found_inf", update.found_inf, part.entries),
            N=KINDS[part.dtypes["N"]],
            ROW=3 if part.dtypes["H"] is None else 4,
            MATH=KINDS[part.math],
            USES_MAX=rule.uses_max_norm,
        )
        part.launch(
            _novograd,
            averages=averages,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.corrections(
                rule.bias_correction, correction1=rule.beta1, correction2=rule.beta2
            ),
            **part.numbers(
                beta1=rule.beta1,
                beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
                eps=rule.eps,
                weight_decay=rule.weight_decay,
            ),
            INSIDE_MOMENT=rule.decays_inside_moment,
        )
    leave(reference.novograd_, others, params, grads, exp_avgs, norms, rule=rule, update=update)
