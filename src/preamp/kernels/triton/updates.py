# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
"""The update rules: a kernel for each, and what it is started with.

Kernels are written as ``preamp.kernels.triton.device`` says; `start` runs on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    SgdRule,
    left_out,
)
from preamp.kernels.triton import launch as launching  # kernels have a `number` and a `scalar` too
from preamp.kernels.triton.device.jit import KINDS, helper, kernel
from preamp.kernels.triton.device.stored import (
    draw,
    has_gaps,
    lanes,
    load_moment,
    load_param,
    row_length,
    scales_of,
    store_moment,
    store_param,
)
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
    number,
    root,
    scalar,
    spared,
    store_one,
    whole_blocks,
)
from preamp.kernels.triton.places import Places
from preamp.kernels.triton.reductions import gather


@kernel
def adam_kernel(
    pointers, layout, n: tl.int64, lr: tl.int64, lr_at, step: tl.int64, step_at, beta1: tl.int64,
    beta1_left: tl.int64, beta2: tl.int64, beta2_left: tl.int64, eps: tl.int64,
    weight_decay: tl.int64, correction1: tl.int64, correction2: tl.int64, inv_scale_at,
    found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, V, H, MATH, LR_AT, STEP_AT, INV_SCALE_AT, FOUND_INF_AT, DECAYS, DECOUPLED, MOMENTS,
    STEP_SIZE, EPS_INSIDE_SQRT, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of an Adam update."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    v_at = address(pointers, n, 3, tensor)
    vs_at = scales_of(pointers, n, KEPT, tensor, 1, V)
    h_at = address_of_half(pointers, n, 4, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    c1 = correction(correction1, step_at, STEP_AT, MATH)
    c2 = correction(correction2, step_at, STEP_AT, MATH)
    if STEP_SIZE:
        size = divide(size * root(c2, MATH), c1, MATH)
    decay = number(weight_decay, MATH)
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | m_at | v_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            m = load_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, MATH)
            v = load_moment(v_at, vs_at, start, first, count, where, mask, EDGE, V, MATH)
            if DECAYS and not DECOUPLED:
                g = g + decay * p
            m = number(beta1, MATH) * m + number(beta1_left, MATH) * g
            v = number(beta2, MATH) * v + number(beta2_left, MATH) * g * g
            store_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, chance, 0, m)
            store_moment(v_at, vs_at, start, first, count, where, mask, EDGE, V, chance, 1, v)
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


def _adam_arguments(part: Places, rule: AdamRule) -> dict[str, Any]:
    corrects = rule.bias_correction is not BiasCorrection.NONE
    return {
        **_rate(part, rule),
        **_corrections(part, rule, corrects),
        **part.numbers(
            beta1=rule.beta1,
            beta1_left=1 - rule.beta1,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
        "MOMENTS": rule.bias_correction is BiasCorrection.MOMENTS,
        "STEP_SIZE": rule.bias_correction is BiasCorrection.STEP_SIZE,
        "EPS_INSIDE_SQRT": rule.eps_inside_sqrt,
    }


@helper
def trusted(rate, norms, n, MATH: tl.constexpr):
    """The rate times the ratio of the two norms, alone where one of them is zero."""
    p_norm = tl.load(norms)
    u_norm = tl.load(norms + n)
    ratio = divide(p_norm, u_norm, MATH)
    return tl.where((p_norm > 0) & (u_norm > 0), rate * ratio, rate)


@helper
def store_sums(norms, p_squares, u_squares):
    """Write the sums of a chunk, those of the second kind behind all of the first."""
    partial = norms + tl.program_id(0).to(tl.int64)
    tl.store(partial, tl.sum(p_squares, 0))
    tl.store(partial + tl.num_programs(0), tl.sum(u_squares, 0))


@kernel
def lamb_kernel(
    pointers, layout, n: tl.int64, norms, lr: tl.int64, lr_at, step: tl.int64, step_at,
    beta1: tl.int64, beta3: tl.int64, beta2: tl.int64, beta2_left: tl.int64, eps: tl.int64,
    weight_decay: tl.int64, correction1: tl.int64, correction2: tl.int64, inv_scale_at,
    found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, V, H, MATH, LR_AT, STEP_AT, INV_SCALE_AT, FOUND_INF_AT, DECAYS, DECOUPLED, CORRECTS,
    TRUST_RATIO, MEASURE, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """Write sums of squares of a chunk's parameters and steps to ``norms``, or take the steps.

    Measuring stores nothing else: steps that are computed twice from the same state are equal,
    whatever dtype the state is rounded to.
    """
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at, g_at = address(pointers, n, 0, tensor), address(pointers, n, 1, tensor)
    m_at, v_at = address(pointers, n, 2, tensor), address(pointers, n, 3, tensor)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    vs_at = scales_of(pointers, n, KEPT, tensor, 1, V)
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
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | m_at | v_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            m = load_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, MATH)
            v = load_moment(v_at, vs_at, start, first, count, where, mask, EDGE, V, MATH)
            if DECAYS and not DECOUPLED:
                g = g + decay * p
            m = number(beta1, MATH) * m + number(beta3, MATH) * g
            v = number(beta2, MATH) * v + number(beta2_left, MATH) * g * g
            if not MEASURE:
                store_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, chance, 0, m)
                store_moment(v_at, vs_at, start, first, count, where, mask, EDGE, V, chance, 1, v)
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
        store_sums(norms, p_squares, u_squares)


def _lamb_arguments(part: Places, rule: LambRule) -> dict[str, Any]:
    """What both launches take."""
    return {
        **_rate(part, rule),
        **_corrections(part, rule, rule.bias_correction),
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


def lamb_norms(part: Places, rule: LambRule) -> torch.Tensor:
    """Measure parameters and steps, rows 0 and 1 of what is returned."""
    return _lamb_norms(part, _lamb_arguments(part, rule))


def _lamb_norms(part: Places, arguments: dict[str, Any]) -> torch.Tensor:
    norms, partials = part.empty(2, part.entries.count), part.empty(2, part.entries.chunks)
    part.launch(lamb_kernel, norms=partials, MEASURE=True, CHANCE=False, **arguments)
    for sums, results in zip(partials, norms, strict=True):
        gather(part.entries, sums, results, largest=False)
    return norms


def _trust_norms(part: Places, rule: LambRule, arguments: dict[str, Any]) -> torch.Tensor:
    norms = part.given_norms()
    if norms is None:
        measures = rule.uses_trust_ratio
        norms = _lamb_norms(part, arguments) if measures else part.empty(2, 1)
    return norms


@kernel
def sgd_kernel(
    pointers, layout, n: tl.int64, lr: tl.int64, lr_at, step: tl.int64, step_at, momentum: tl.int64,
    share: tl.int64, weight_decay: tl.int64, inv_scale_at, found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, H, MATH, LR_AT, STEP_AT, INV_SCALE_AT, FOUND_INF_AT, HAS_MOMENTUM, NESTEROV,
    DECAYS_BEFORE, DECAYS_AFTER, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of a step of gradient descent."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    is_first = scalar(step, step_at, STEP_AT, MATH) == 1
    decay = number(weight_decay, MATH)
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | m_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            if DECAYS_BEFORE:
                g = g + decay * p
            if HAS_MOMENTUM:
                m = load_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, MATH)
                later = number(momentum, MATH) * m + number(share, MATH) * g
                m = tl.where(is_first, g, later)
                store_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, chance, 0, m)
                if NESTEROV:
                    g = g + number(momentum, MATH) * m
                else:
                    g = m
            if DECAYS_AFTER:
                g = g + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * g)
            first += BLOCK


def _sgd_arguments(part: Places, rule: SgdRule) -> dict[str, Any]:
    decays = rule.weight_decay != 0
    return {
        **_rate(part, rule),
        **part.corrections(False),
        **part.numbers(
            momentum=rule.momentum, share=1 - rule.dampening, weight_decay=rule.weight_decay
        ),
        "HAS_MOMENTUM": rule.momentum != 0,
        "NESTEROV": rule.nesterov,
        "DECAYS_BEFORE": decays and not rule.decays_after_momentum,
        "DECAYS_AFTER": decays and rule.decays_after_momentum,
    }


@kernel
def lars_kernel(
    pointers, layout, n: tl.int64, p_norms, g_norms, lr: tl.int64, lr_at, momentum: tl.int64,
    weight_decay: tl.int64, trust_coefficient: tl.int64, eps: tl.int64, inv_scale_at, found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, H, MATH, LR_AT, INV_SCALE_AT, FOUND_INF_AT, NESTEROV, TRUST_RATIO, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of a LARS update; the norms are those of whole tensors."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
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
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | m_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            m = load_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, MATH)
            change = rate * (g + decay * p)
            m = number(momentum, MATH) * m - change
            store_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, chance, 0, m)
            if NESTEROV:
                m = number(momentum, MATH) * m - change
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p + m)
            first += BLOCK


def _lars_arguments(part: Places, rule: LarsRule) -> dict[str, Any]:
    p_norms = g_norms = part.entries.layout
    known = part.given_norms()
    if known is not None:
        p_norms, g_norms = known
    elif rule.uses_trust_ratio:
        p_norms, g_norms = part.norms("P"), part.norms("G", part.update.inv_scale)
    return {
        **_rate(part, rule),
        **part.numbers(
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            trust_coefficient=rule.trust_coefficient,
            eps=rule.eps,
        ),
        "p_norms": p_norms,
        "g_norms": g_norms,
        "NESTEROV": rule.nesterov,
        "TRUST_RATIO": rule.uses_trust_ratio,
    }


@kernel
def adagrad_kernel(
    pointers, layout, n: tl.int64, lr: tl.int64, lr_at, eps: tl.int64, weight_decay: tl.int64,
    inv_scale_at, found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, H, MATH, LR_AT, INV_SCALE_AT, FOUND_INF_AT, DECAYS, DECOUPLED, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of an Adagrad update."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    sum_at = address(pointers, n, 2, tensor)
    sums_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    decay = number(weight_decay, MATH)
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | sum_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            total = load_moment(sum_at, sums_at, start, first, count, where, mask, EDGE, M, MATH)
            if DECAYS and not DECOUPLED:
                g = g + decay * p
            total = total + g * g
            store_moment(sum_at, sums_at, start, first, count, where, mask,
                EDGE, M, chance, 0, total)  # fmt: skip
            direction = divide(g, root(total, MATH) + number(eps, MATH), MATH)
            if DECAYS and DECOUPLED:
                direction = direction + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * direction)
            first += BLOCK


def _adagrad_arguments(part: Places, rule: AdagradRule) -> dict[str, Any]:
    return {
        **_rate(part, rule),
        **part.numbers(eps=rule.eps, weight_decay=rule.weight_decay),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
    }


@kernel
def average_norms(
    pointers, layout, n: tl.int64, norms, averages, beta2: tl.int64, beta2_left: tl.int64,
    found_inf_at,
    N, ROW, MATH, FOUND_INF_AT, USES_MAX,
):  # fmt: skip
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
    pointers, layout, n: tl.int64, averages, lr: tl.int64, lr_at, step: tl.int64, step_at,
    beta1: tl.int64, beta3: tl.int64, eps: tl.int64, weight_decay: tl.int64, correction1: tl.int64,
    correction2: tl.int64, inv_scale_at, found_inf_at,
    seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, H, MATH, LR_AT, STEP_AT, INV_SCALE_AT, FOUND_INF_AT, INSIDE_MOMENT, CHUNK,
    KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of a NovoGrad update; ``averages`` is what `average_norms` wrote."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at = address(pointers, n, 0, tensor)
    g_at = address(pointers, n, 1, tensor)
    m_at = address(pointers, n, 2, tensor)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    h_at = address_of_half(pointers, n, 3, tensor, H)
    size = scalar(lr, lr_at, LR_AT, MATH)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT, MATH)
    decay = number(weight_decay, MATH)
    c1 = correction(correction1, step_at, STEP_AT, MATH)
    c2 = correction(correction2, step_at, STEP_AT, MATH)
    denominator = divide(tl.load(averages + tensor), root(c2, MATH), MATH) + number(eps, MATH)
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    whole = whole_blocks(p_at | g_at | m_at | h_at | has_gaps(length), count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where, mask = lanes(first, start, count, length, EDGE, IN_BLOCKS)
            p = load_param(p_at, h_at, start, where, mask, EDGE, P, H, MATH)
            g = load(g_at, start, where, mask, EDGE, G, MATH) * inv_scale
            chance = draw(pointers, n, KEPT, tensor, start, where, length, seed, turn, turn_at,
                          TURN_AT, CHANCE)  # fmt: skip
            m = load_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, MATH)
            if INSIDE_MOMENT:
                g = divide(g, denominator, MATH) + decay * p
            m = number(beta1, MATH) * m + number(beta3, MATH) * g
            store_moment(m_at, ms_at, start, first, count, where, mask, EDGE, M, chance, 0, m)
            direction = divide(m, c1, MATH)
            if not INSIDE_MOMENT:
                direction = divide(direction, denominator, MATH) + decay * p
            store_param(p_at, h_at, start, where, mask, EDGE, P, H, p - size * direction)
            first += BLOCK


def _novograd_arguments(part: Places, rule: NovoGradRule) -> dict[str, Any]:
    return {
        **_rate(part, rule),
        **_corrections(part, rule, rule.bias_correction),
        **part.numbers(
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "INSIDE_MOMENT": rule.decays_inside_moment,
    }


def _blend_norms(part: Places, rule: NovoGradRule) -> torch.Tensor:
    """Blend the gradients' norms into the averages; also stores these."""
    known = part.given_norms()
    if known is None:
        measured = part.norms("G", part.update.inv_scale, largest=rule.uses_max_norm)
    else:
        measured = known[0]
    averages = torch.empty_like(measured)
    launching.launch(
        average_norms,
        (part.entries.count,),
        part.entries,
        norms=measured,
        averages=averages,
        **part.numbers(beta2=rule.beta2, beta2_left=1 - rule.beta2),
        **launching.given("found_inf", part.update.found_inf, part.entries),
        N=KINDS[part.dtypes["N"]],
        ROW=3 if part.dtypes["H"] is None else 4,
        MATH=KINDS[part.math],
        USES_MAX=rule.uses_max_norm,
    )
    return averages


def _corrections(
    part: Places, rule: AdamRule | LambRule | NovoGradRule, wanted: bool
) -> dict[str, Any]:
    return part.corrections(wanted, correction1=rule.beta1, correction2=rule.beta2)


def start(part: Places, rule: Rule) -> None:
    """Launch the kernels of ``rule``."""
    update, arguments = _kernel_and_arguments(part, rule)
    part.launch(update, **arguments)


def _rate(part: Places, rule: Rule) -> dict[str, Any]:
    return launching.scalar("lr", rule.lr, part.entries, part.math)


def _kernel_and_arguments(part: Places, rule: Rule) -> tuple[Any, dict[str, Any]]:
    """The kernel of the update, and its arguments.

    Launches what measures norms, for rules that need them.
    """
    match rule:
        case AdamRule():
            return adam_kernel, _adam_arguments(part, rule)
        case LambRule():
            arguments = _lamb_arguments(part, rule)
            norms = _trust_norms(part, rule, arguments)
            return lamb_kernel, arguments | {"norms": norms, "MEASURE": False}
        case SgdRule():
            return sgd_kernel, _sgd_arguments(part, rule)
        case NovoGradRule():
            arguments = _novograd_arguments(part, rule)
            return novograd_kernel, arguments | {"averages": _blend_norms(part, rule)}
        case AdagradRule():
            return adagrad_kernel, _adagrad_arguments(part, rule)
        case LarsRule():
            return lars_kernel, _lars_arguments(part, rule)
        case _:
            left_out(rule)
