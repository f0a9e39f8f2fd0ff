# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
"""The update of every rule: one kernel around their formulas.

The kernel loads and stores; `preamp.kernels.rules` has what happens in between. It is written as
``preamp.kernels.triton.device`` says; `preamp.kernels.triton.works` starts it.
"""

from __future__ import annotations

import triton.language as tl

from preamp.kernels import rules
from preamp.kernels.triton.device.jit import helper, kernel
from preamp.kernels.triton.device.stored import (
    draw,
    has_gaps,
    lanes,
    load_moment,
    load_param,
    row_length,
    scales_of,
    source_of,
    store_moment,
    store_param,
)
from preamp.kernels.triton.device.walk import (
    BLOCK,
    address,
    address_if,
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

SGD, LARS, ADAGRAD, NOVOGRAD, OTHER = map(tl.constexpr, range(5))
"""What ``RULE`` is; of Adam and LAMB ``OTHER``."""

KINDS_OF_RULES: dict[type[rules.Rule], tl.constexpr] = {
    rules.SgdRule: SGD,
    rules.LarsRule: LARS,
    rules.AdagradRule: ADAGRAD,
    rules.NovoGradRule: NOVOGRAD,
    rules.AdamRule: OTHER,
    rules.LambRule: OTHER,
}


@helper
def _choose(condition, a, b):
    return tl.where(condition, a, b)


# Triton's interpreter looks for `tl` among the globals of what it runs.
_formulas = rules.bound_formulas(
    helper, root=root, divide=divide, corrected=divide, choose=_choose, tl=tl
)
_moments, _direction = _formulas[rules.moments], _formulas[rules.direction]
_sgd, _lars, _adagrad = (_formulas[f] for f in (rules.sgd, rules.lars, rules.adagrad))
_novograd = _formulas[rules.novograd]


@helper
def trusted(rate, norms, n, decay, eps, coefficient, RULE: tl.constexpr):
    """The rate times the trust ratio of LAMB or LARS, alone where one of both norms is zero."""
    p_norm = tl.load(norms)
    other = tl.load(norms + n)
    if RULE == LARS:
        ratio = coefficient * divide(p_norm, other + decay * p_norm + eps)
    else:
        ratio = divide(p_norm, other)
    return tl.where((p_norm > 0) & (other > 0), rate * ratio, rate)


@helper
def store_sums(norms, p_squares, u_squares):
    """Write the sums of a chunk, those of the second kind behind all of the first."""
    partial = norms + tl.program_id(0).to(tl.int64)
    tl.store(partial, tl.sum(p_squares, 0))
    tl.store(partial + tl.num_programs(0), tl.sum(u_squares, 0))


@kernel
def update_kernel(
    pointers, layout, n: tl.int64, grads, norms, lr: tl.int64, lr_at, step: tl.int64, step_at,
    correction1: tl.int64, correction2: tl.int64, beta1: tl.int64, share: tl.int64, beta2: tl.int64,
    rest: tl.int64, momentum: tl.int64, eps: tl.int64, decay: tl.int64,
    coefficient: tl.int64, inv_scale_at, found_inf_at, seed: tl.int64, turn: tl.int64, turn_at,
    P, G, M, V, H, H_ROW, LEADS, LR_AT, STEP_AT, INV_SCALE_AT, FOUND_INF_AT, RULE, MEASURE,
    TRUST_RATIO, CORRECTS, STEP_SIZE, COUPLED, DECOUPLED, CORRECTED, EPS_INSIDE, HAS_MOMENTUM,
    NESTEROV, BEFORE, AFTER, INSIDE, CHUNK, WIDTH, KEPT, TURN_AT, CHANCE, IN_BLOCKS,
):  # fmt: skip
    """One chunk of an update by ``RULE``.

    With ``MEASURE``, sums of squares of the chunk's parameters and directions go to ``norms``, and
    nothing else is stored: directions that are computed twice from the same state are equal,
    whatever dtype the state is rounded to. Otherwise ``norms`` has what the rule needs of tensors.
    """
    tensor, start, count = find_chunk(layout, n, CHUNK)
    count = spared(count, found_inf_at, FOUND_INF_AT)
    p_at, g_at = address(pointers, n, 0, tensor), address(grads, n, 0, tensor)
    m_at, v_at = address(pointers, n, 1, tensor), address_if(pointers, n, 2, tensor, V)
    ms_at = scales_of(pointers, n, KEPT, tensor, 0, M)
    vs_at = scales_of(pointers, n, KEPT, tensor, 1, V)
    h_at = address_if(pointers, n, H_ROW, tensor, H)
    inv_scale = factor_or_one(inv_scale_at, INV_SCALE_AT)
    size = scalar(lr, lr_at, LR_AT)
    decay, eps = number(decay), number(eps)
    beta1, share = number(beta1), number(share)
    beta2, rest = number(beta2), number(rest)
    momentum = number(momentum)
    is_first = size
    if RULE == SGD:
        is_first = scalar(step, step_at, STEP_AT) == 1
    c1, c2 = size, size
    if CORRECTS:
        c1 = correction(correction1, step_at, STEP_AT)
        c2 = correction(correction2, step_at, STEP_AT)
    if STEP_SIZE:
        size = divide(size * root(c2), c1)
    if TRUST_RATIO and not MEASURE:
        size = trusted(size, norms + tensor, n, decay, eps, number(coefficient), RULE)
    denominator = size
    if RULE == NOVOGRAD:
        denominator = divide(tl.load(norms + tensor), root(c2)) + eps
    p_squares = tl.zeros([BLOCK], tl.float32)
    u_squares = tl.zeros([BLOCK], tl.float32)
    length = row_length(pointers, n, KEPT, tensor, IN_BLOCKS)
    key, origin, turn = source_of(pointers, n, KEPT, tensor, seed, turn, turn_at, TURN_AT, CHANCE)
    aligned = p_at | g_at | m_at | v_at | h_at
    whole = whole_blocks(aligned | has_gaps(length) | origin & 7, count)
    for AT_ONCE in tl.static_range(WIDTH, 0, 1 - WIDTH):  # and then one by one
        first, end = bounds(whole, count, AT_ONCE)
        while first < end:
            begin, where, mask = lanes(start, first, count, length, AT_ONCE, IN_BLOCKS)
            chance = draw(key, origin + begin, where, turn, AT_ONCE, CHANCE)
            p = load_param(p_at, h_at, begin, where, mask, AT_ONCE, P, H, LEADS)
            g = load(g_at, begin, where, mask, AT_ONCE, G) * inv_scale
            m = p
            if HAS_MOMENTUM:
                m = load_moment(m_at, ms_at, start, first, count, begin, where, mask, AT_ONCE, M)
            if V is not None:
                v = load_moment(v_at, vs_at, start, first, count, begin, where, mask, AT_ONCE, V)
                m, v = _moments(p, g, m, v, beta1, share, beta2, rest, decay, COUPLED)
                if not MEASURE:  # before anything else, so that fewer registers are in use
                    store_moment(m_at, ms_at, start, first, count, begin, where, mask, AT_ONCE,
                                 M, chance, 0, m)  # fmt: skip
                    store_moment(v_at, vs_at, start, first, count, begin, where, mask, AT_ONCE,
                                 V, chance, 1, v)  # fmt: skip
                u = _direction(p, m, v, c1, c2, eps, decay, DECOUPLED, CORRECTED, EPS_INSIDE)
                if MEASURE:
                    u = tl.where(mask, u, 0)  # without eps it is nan beyond the end
                    p_squares += p * p
                    u_squares += u * u
                p = p - size * u
            elif RULE == SGD:
                p, m = _sgd(p, g, m, size, is_first, momentum, share, decay, HAS_MOMENTUM, NESTEROV,
                            BEFORE, AFTER)  # fmt: skip
            elif RULE == LARS:
                p, m = _lars(p, g, m, size, momentum, decay, NESTEROV)
            elif RULE == ADAGRAD:
                p, m = _adagrad(p, g, m, size, eps, decay, COUPLED, DECOUPLED)
            else:
                p, m = _novograd(p, g, m, denominator, size, c1, beta1, share, decay, INSIDE)
            if HAS_MOMENTUM and V is None:
                store_moment(
                    m_at, ms_at, start, first, count, begin, where, mask, AT_ONCE, M, chance, 0, m
                )
            if not MEASURE:
                store_param(p_at, h_at, begin, where, mask, AT_ONCE, P, H, p)
            first += BLOCK
    if MEASURE:
        store_sums(norms, p_squares, u_squares)


@kernel
def average_norms(
    pointers, layout, n: tl.int64, norms, averages, beta2: tl.int64, beta2_left: tl.int64,
    found_inf_at,
    N, ROW, FOUND_INF_AT, USES_MAX,
):  # fmt: skip
    """Blend the norm of one gradient into its average, unrounded for the update that follows."""
    tensor = tl.program_id(0).to(tl.int64)
    at = address(pointers, n, ROW, tensor)
    norm = tl.load(norms + tensor)
    v = load_one(at, N)
    if USES_MAX:
        blend = number(beta2) * v + number(beta2_left) * norm
    else:
        blend = number(beta2) * v * v + number(beta2_left) * norm * norm
        blend = root(blend)
    blend = tl.where(v < 0, norm, blend)
    tl.store(averages + tensor, blend)
    if spared(1, found_inf_at, FOUND_INF_AT) == 1:  # older interpreters store scalars unmasked
        store_one(at, N, blend)
