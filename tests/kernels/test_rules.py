# SPDX-License-Identifier: BSD-3-Clause
"""The update rules of every back end against float64, and what one update is told."""

import gc
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.back_ends import AS_THEY_ARE, JIT, REFERENCE, as_they_are, defaults, here
from cases.exact import Exact, assert_within_ulps
from cases.layouts import LAYOUTS
from cases.rules import BF16, F16, F32, F64, FUSED, ONE_EACH, ORACLES, ROWS, SIGNATURES, RuleRow
from cases.stored import assert_bits, bits_of, copied
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp.core.dtypes import math_dtype
from preamp.kernels import Update, lamb_norms
from preamp.kernels.rules import RULES, AdamRule, BiasCorrection
from preamp.kernels.stored import taken_over

ULPS = 4
"""What the op table allows. Rounding on store is one half of one."""

ULPS_WITH_NORMS = 16
"""A sum of many squares depends on its order; each back end has its own."""

SIZES = ((), (0,), (1,), (7,), (41,), (3, 0, 2), (11, 13), (2, 3, 4, 5))
EDGES = tuple(block + by for block in (1 << 16, 1 << 18) for by in (-1, 0, 1))

EDGES_OF_CHUNKS = (1024, 8191, 8192, 8193)
"""Of those of Triton's kernels."""

UNCORRECTED = ("adam_-none", "lamb_-grad_averaging-uses_trust_ratio", "novograd_-grad_averaging")
READ_ON_DEVICE = (*ONE_EACH, *(row for row in ROWS if row.name in UNCORRECTED))
"""Each op, and each way to use a bias correction, or none."""

WITH_NORMS = [row for row in ONE_EACH if row.rule.takes_norms or row.rule.has_numbers]

Lists = list[list[torch.Tensor]]

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)
every_signature = pytest.mark.parametrize(
    "dtypes", SIGNATURES, ids=lambda s: "-".join(str(d).removeprefix("torch.") for d in s)
)


def draw(seed: int, dtype: torch.dtype, shapes: Sequence[Any] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def lists_of(
    row: RuleRow, p: torch.dtype, g: torch.dtype, s: torch.dtype, shapes: Sequence[Any] = SIZES
) -> Lists:
    """State is as after some steps; norms of every other tensor as before the first."""
    state = [draw(20 + index, s, shapes) for index in range(row.states)]
    if row.rule.has_numbers:
        values = (0.5 + index if index % 2 else -1.0 for index in range(len(shapes)))
        state[-1] = [torch.tensor(value, dtype=s) for value in values]
    elif row.op not in ("sgd_", "lars_", "lion_"):
        state[-1] = [value.abs() for value in state[-1]]
    return [draw(1, p, shapes), draw(2, g, shapes), *state]


def anyhow(lists: Lists) -> Lists:
    """The same in all layouts, which take turns in each list."""
    return [
        [LAYOUTS[(number + place) % len(LAYOUTS)](tensor) for place, tensor in enumerate(tensors)]
        for number, tensors in enumerate(lists)
    ]


def rounded(params: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Any]:
    """The half weights of some parameters."""
    return [param.to(dtype, copy=True) for param in params]


def run(ops: Any, row: RuleRow, lists: Lists, rule: Any = None, **update: Any) -> Lists:
    """Update copies of ``lists``; returns them."""
    lists = copied(lists)
    ops.update_(*lists, rule=rule or row.rule, update=Update(**update))
    return lists


def assert_exact(
    row: RuleRow, ours: Lists, before: Lists, rule: Any = None, step: int = 1, scale: float = 1.0
) -> None:
    """Parameters and state are the oracle's; gradients are as they were."""
    allowed = ULPS_WITH_NORMS if row.rule.takes_norms else ULPS
    computed = math_dtype(before[0][0].dtype) if before[0] else F32
    for place, tensors in enumerate(zip(*before, strict=True)):
        p, g, *state = (Exact.of(tensor) for tensor in tensors)
        wanted = ORACLES[row.op](rule or row.rule, step, p, g * scale, *state)
        new = [ours[0][place], *(each[place] for each in ours[2:])]
        for number, (one, exact) in enumerate(zip(new, wanted, strict=True)):
            assert_within_ulps(one, exact, allowed, computed=computed, where=f"{place}, {number}")
        assert_same(ours[1][place], tensors[1], "gradients are read only")


def assert_rounded(halves: Sequence[Any], params: Sequence[torch.Tensor]) -> None:
    pairs = [pair for pair in zip(halves, params, strict=True) if pair[0] is not None]
    assert_bits([half for half, _ in pairs], [param.to(half.dtype) for half, param in pairs])


def assert_kept(ours: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Nothing has changed, payloads of nan and signs of zeros included."""
    for one, old in zip(ours, before, strict=True):
        assert torch.equal(bits_of(one), bits_of(old))


def test_every_rule_has_rows_and_an_oracle() -> None:
    assert {type(row.rule) for row in ROWS} == set(RULES)
    assert set(ORACLES) == {row.op for row in ROWS}


# -- formulas --------------------------------------------------------------------------------------


@every_signature
@every_row
def test_rules_are_their_formulas(ops: Any, row: RuleRow, dtypes: tuple[Any, ...]) -> None:
    """However tensors lie, and with halves of several dtypes beside each other.

    1e30 is infinite in float16.
    """
    p, g, s, h = dtypes
    before = lists_of(row, p, g, s)
    if p in (F32, F64) and not row.rule.takes_norms:
        before[0][6][0, :2], before[1][6][0, :2] = 1e30, 0.0
    before = anyhow(before)
    kinds = (h, None, F16, BF16) if h else (None,)
    kinds = [kinds[place % len(kinds)] for place in range(len(SIZES))]
    halves = [k and t.to(k, copy=True) for k, t in zip(kinds, before[0], strict=True)]
    told = {"step": 3, "inv_scale": torch.tensor(0.3), "found_inf": torch.zeros(())}
    ours = run(ops, row, before, halves=halves, **told)
    assert_exact(row, ours, before, step=3, scale=torch.tensor(0.3).item())
    assert_rounded(halves, ours[0])
    assert [t.stride() for t in ours[0]] == [t.stride() for t in before[0]]


@pytest.mark.threes
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("step", [1, 2, 5000])
@pytest.mark.parametrize("row", READ_ON_DEVICE, ids=lambda row: row.name)
def test_numbers_and_tensors_say_the_same(
    ops: Any, row: RuleRow, step: int, dtype: torch.dtype
) -> None:
    before = lists_of(row, dtype, BF16, dtype)
    rate = torch.tensor(0.1)
    rule = replace(row.rule, lr=rate.item())
    assert_exact(row, run(ops, row, before, rule, step=step), before, rule, step)
    found = list[list[torch.Tensor]]()
    for counter, kind in ((torch.int64, F32), (torch.int32, F64)):
        on_device = replace(row.rule, lr=rate.to(kind))
        told = {"step": torch.tensor(step, dtype=counter), "found_inf": torch.zeros(())}
        told["inv_scale"] = torch.tensor(1.0, dtype=dtype)
        ours = run(ops, row, before, on_device, **told)
        assert_exact(row, ours, before, rule, step)
        found.append([tensor for each in ours for tensor in each])
    assert_bits(*found)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_corrections_keep_their_digits(ops: Any, dtype: torch.dtype) -> None:
    """``1 - 0.999**step`` has lost half of them in float32."""
    numbers = {"lr": 1.0, "eps": 0.0, "weight_decay": 0.0, "decoupled": True}
    kind = BiasCorrection.MOMENTS
    for step in (1, 2, 5, 60, 100, 509, 692, 694, 700, 10**4, 10**6):
        first, second = (-math.expm1(step * math.log(beta)) / (1 - beta) for beta in (0.999, 0.9))
        for betas, wanted in (((0.0, 0.999), first**0.5), ((0.9, 0.0), 1 / second)):
            rule = AdamRule(beta1=betas[0], beta2=betas[1], **numbers, bias_correction=kind)
            p, g, m, v = ([torch.full((3,), x, dtype=dtype)] for x in (0.0, 1.0, 0.0, 0.0))
            ops.update_(p, g, m, v, rule=rule, update=Update(step=torch.tensor(step)))
            eps = 8 * torch.finfo(dtype).eps
            assert (-p[0]).tolist() == pytest.approx([wanted] * 3, rel=eps), (step, betas)


@pytest.mark.parametrize("row", [r for r in ROWS if getattr(r.rule, "uses_trust_ratio", False)])
@pytest.mark.parametrize("zero", [(0,), (1,), (0, 1)], ids=["weights", "gradients", "both"])
def test_a_norm_of_zero_has_no_ratio(ops: Any, row: RuleRow, zero: tuple[int, ...]) -> None:
    before = lists_of(row, F32, F32, F32)
    for number in (*zero, 2):
        before[number] = [torch.zeros_like(tensor) for tensor in before[number]]
    assert_exact(row, run(ops, row, before), before)


@pytest.mark.parametrize("row", [row for row in ROWS if row.op == "novograd_"])
def test_a_norm_of_zero_is_a_norm(ops: Any, row: RuleRow) -> None:
    """Only a negative one means that there is none yet."""
    before = lists_of(row, F32, F32, F32)
    before[3] = [torch.zeros(()) for _ in SIZES]
    assert_exact(row, run(ops, row, before, step=2), before, step=2)


@pytest.mark.parametrize("momentum", [torch.nan, 1.0])
def test_buffers_without_momentum_are_not_touched(ops: Any, momentum: float) -> None:
    row = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum == 0)
    before = lists_of(row, F32, F32, BF16)
    before[2] = [torch.full_like(tensor, momentum) for tensor in before[2]]
    assert_kept(run(ops, row, before, step=2)[2], before[2])


# -- skipping --------------------------------------------------------------------------------------


@pytest.mark.threes
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1.0])
@every_signature
@one_each
def test_an_overflow_keeps_every_bit(
    ops: Any, row: RuleRow, dtypes: tuple[Any, ...], bad: float
) -> None:
    """Of masters too that have not taken over what their half weights say."""
    p, g, s, h = dtypes
    before = lists_of(row, p, g, s)
    before[1] = [tensor.fill_(bad) for tensor in before[1]]
    for number, tensors in enumerate([before[0], *before[2:]]):
        spoiled = [tensor.view(-1) for tensor in tensors if tensor.numel()]
        spoiled[number][0] = -0.0
        bits_of(spoiled[3])[0] = -1  # a nan that no arithmetic gives
    halves: list[Any] = [None] * len(SIZES) if h is None else draw(3, h)
    halves[0] = None
    kept = [half.clone() for half in halves if half is not None]
    options = {"inv_scale": torch.tensor(0.5), "halves": halves}
    for step, flag in ((1, 2.0), (torch.tensor(1), math.nan)):  # of two ranks, summed; of any kind
        ours = run(ops, row, before, step=step, found_inf=torch.tensor(flag), **options)
        for one, old in zip(ours, before, strict=True):
            assert_kept(one, old)
        assert_kept([half for half in halves if half is not None], kept)


@one_each
def test_a_bad_gradient_spoils_its_own_tensors_only(ops: Any, row: RuleRow) -> None:
    before = lists_of(row, F32, F32, F32)
    before[1][4][40] = math.nan
    ours, wanted = (run(back_end, row, before, step=3) for back_end in (ops, REFERENCE))
    for place, (one, other) in enumerate(zip(ours[0], wanted[0], strict=True)):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert bool(one.isfinite().all()) == (place != 4)


# -- half weights are the truth, and masters refine them -------------------------------------------

SHAPES = ((), (0,), (7,), (11, 13), (2000,))
KINDS = [(F32, BF16, BF16), (F32, F16, F16), (F32, F32, BF16), (F64, F16, F16)]
"""dtypes of masters, gradients and half weights."""


def written(masters: list[torch.Tensor], half: torch.dtype) -> list[torch.Tensor]:
    """Half weights of masters, of which others have written some; masters change in one place.

    There are zeros of both signs, subnormal ones, infinities and nan, and a master beyond float16.
    """
    halves = [master.to(half) for master in masters]
    masters[3][0, :2] = 1e6
    halves[3][0, :2] = masters[3][0, :2].to(half)
    halves[3][0, 1] = 65504.0
    values = [0.0, -0.0, 2.0**-24, -(2.0**-14), math.inf, math.nan, 3.0]
    halves[2][:] = torch.tensor(values, dtype=half)
    masters[2][:2] = torch.tensor([-0.0, -0.0])
    halves[4][::7] = 0.25
    return halves


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@one_each
def test_updates_start_from_both(
    ops: Any, row: RuleRow, layout: Any, dtypes: tuple[Any, ...]
) -> None:
    master, grad, half = dtypes
    lists = [list(map(layout, column)) for column in lists_of(row, master, grad, master, SHAPES)]
    halves = list(map(layout, written(lists[0], half)))
    told = {"step": 3, "inv_scale": torch.tensor(0.5)}
    found: list[list[torch.Tensor]] = []
    for leads in (True, False):
        own, (weights,) = copied(lists), copied([halves])
        if not leads:  # the same of masters that have taken over, and outputs of any values
            for value, weight in zip(own[0], weights, strict=True):
                value.copy_(taken_over(value, weight))
                weight.fill_(5.0)
        ops.update_(*own, rule=row.rule, update=Update(**told, halves=weights, halves_lead=leads))
        found.append([tensor for column in (*own, weights) for tensor in column])
    if row.rule.takes_norms:  # of tensors that lie differently, whose sums have another order
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert_bits(*found)


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_masters_take_over(ops: Any, layout: Any, dtypes: tuple[Any, ...]) -> None:
    masters = [layout(torch.randn(shape).to(dtypes[0])) for shape in SHAPES]
    halves = list(map(layout, written(masters, dtypes[2])))
    wanted = list(map(taken_over, masters, halves))
    (before,) = copied([halves])
    ops.take_over_(masters, halves)
    assert_bits(masters, wanted)
    assert_bits(halves, before)
    assert_rounded(halves, masters)
    assert masters[3][0, 0] == 1e6, "its half weight is what it rounds to"


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "edges"), [*((name, EDGES) for name in AS_THEY_ARE), ("triton", EDGES_OF_CHUNKS)],
    indirect=["ops"],
)  # fmt: skip
@one_each
def test_sizes_at_the_edges_of_blocks(ops: Any, row: RuleRow, edges: Any) -> None:
    before = lists_of(row, F32, BF16, F32, edges)
    halves = rounded(before[0], BF16)
    ours = run(ops, row, before, step=2, halves=halves)
    assert_exact(row, ours, before, step=2)
    assert_rounded(halves, ours[0])


@as_they_are
@one_each
def test_long_sums_keep_their_digits(ops: Any, row: RuleRow) -> None:
    """Torch's own float32 norm of as many equal values is off by thousands of ulps on a CPU."""
    before = lists_of(row, F32, F32, F32, [((1 << 18) + 5,), (9999,)])
    for tensor in (tensor for tensors in before for tensor in tensors if tensor.dim()):
        tensor.fill_(1.1)
    assert_exact(row, run(ops, row, before, step=2), before, step=2)


@here
def test_thousands_of_tiny_tensors(ops: Any) -> None:
    row = FUSED[0]
    before = lists_of(row, F32, F16, F32, [(index % 4,) for index in range(4_000)])
    joined = [[torch.cat(tensors)] for tensors in before]
    halves = rounded(before[0], F16)
    ours = run(ops, row, before, step=2, halves=halves)
    assert_exact(row, [[torch.cat(tensors)] for tensors in ours], joined, step=2)
    assert_rounded(halves, ours[0])


@one_each
def test_no_tensors_at_all(ops: Any, row: RuleRow) -> None:
    ops.update_(*([] for _ in range(2 + row.states)), rule=row.rule, update=Update())


# -- what does not fit, in a skipped step too ------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (1, 40), (40,)], ids=str)
@one_each
def test_state_of_another_shape_is_refused(ops: Any, row: RuleRow, shape: Any) -> None:
    """As of another model's checkpoint; torch's fused kernels would read past its end."""
    lists = lists_of(row, F32, F32, F32, [(3,), (40, 1), (3,)])
    lists[2][1] = torch.ones(shape)
    before = copied(lists)
    for found_inf in (None, torch.ones(())):
        update = Update(step=2, found_inf=found_inf)
        with refused("kernels", "a state of another shape", shape=shape, number=1, wanted=(40, 1)):
            ops.update_(*lists, rule=row.rule, update=update)
    for ours, old in zip(lists, before, strict=True):
        assert_kept(ours, old)


@one_each
def test_lists_of_unequal_length_are_refused(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32, [(2,), (2,)])
    before = copied(lists)
    lists[1].pop()
    words = "^Lists of 2, 1, " if ops is JIT else r"^zip\(\) argument 2 is shorter|^Lists of 2, 1, "
    for found_inf in (None, torch.ones(())):
        with pytest.raises(ValueError, match=words):
            ops.update_(*lists, rule=row.rule, update=Update(found_inf=found_inf))
    assert_kept(lists[0], before[0])


# -- autograd, the process, and lists that were seen before ----------------------------------------


@every_row
def test_writes_are_noticed_by_autograd(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32)
    halves = rounded(lists[0], BF16)
    lists[0] = [param.clone().requires_grad_() for param in lists[0]]
    loss = (lists[0][4] * lists[0][4]).sum()
    is_written = [True, False, *[getattr(row.rule, "momentum", 1) != 0] * row.states, True]
    columns = [*lists, halves]
    versions = [[tensor._version for tensor in each] for each in columns]
    ops.update_(*lists, rule=row.rule, update=Update(halves=halves))
    for each, before, writes in zip(columns, versions, is_written, strict=True):
        changes = zip(each, before, strict=True)
        assert {t._version > was for t, was in changes if t.numel()} == {writes}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@one_each
def test_no_history_is_recorded(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32)
    params = [torch.nn.Parameter(tensor) for tensor in lists[0]]
    grads = [tensor.requires_grad_() * 1 for tensor in lists[1]]
    rule = replace(row.rule, lr=torch.tensor(0.1, requires_grad=True))
    ops.update_(params, grads, *lists[2:], rule=rule, update=Update(step=2))
    for tensor in (*params, *(tensor for each in lists[2:] for tensor in each)):
        assert tensor.grad_fn is None
        assert tensor.is_leaf
    assert all(param.requires_grad for param in params)


@here
@one_each
def test_defaults_of_the_process_do_not_matter(ops: Any, row: RuleRow) -> None:
    """A step of 301 is none in bfloat16; "meta" stands for a GPU beside parameters on the CPU."""
    before = lists_of(row, F32, BF16, F32)
    options = {"step": 301, "inv_scale": torch.tensor(0.3), "found_inf": torch.zeros(())}
    wanted = run(ops, row, before, **options)
    for dtype, device in ((BF16, "cpu"), (F64, "cpu"), (F32, "meta")):
        lists = copied(before)
        with defaults(dtype, device):
            ops.update_(*lists, rule=row.rule, update=Update(**options))
        for ours, exact in zip(lists, wanted, strict=True):
            assert_kept(ours, exact)


@as_they_are
@pytest.mark.parametrize("change", ["layout", "dtype", "shape", "none"])
def test_lists_seen_before_are_looked_at_again(ops: Any, change: str) -> None:
    """What is kept of them may not hide what was assigned to ``data`` in between."""
    row, shapes = FUSED[0], [(4, 6), (3,), (5, 2), (3,)]
    lists = lists_of(row, F32, F32, F32, shapes)
    update = Update(step=2, inv_scale=torch.tensor(0.5))
    for _ in range(3):  # guards are made at the second call
        ops.update_(*lists, rule=row.rule, update=update)
    moment = lists[2][0]
    if change == "layout":
        moment.data = moment.data.t().contiguous().t()
    elif change == "dtype":
        moment.data = moment.data.double()
    elif change == "shape":
        moment.data = moment.data.view(6, 4)
        words = {"shape": (6, 4), "number": 0, "wanted": (4, 6)}
        with refused("kernels", "a state of another shape", **words):
            ops.update_(*lists, rule=row.rule, update=update)
        return
    before = copied(lists)
    ops.update_(*lists, rule=row.rule, update=update)
    assert_exact(row, lists, before, step=2, scale=0.5)


@as_they_are
def test_what_is_kept_of_lists_keeps_no_tensor_alive(ops: Any) -> None:
    lists = lists_of(FUSED[0], F32, BF16, F32, [(11,), (12,)])
    for _ in range(3):
        ops.update_(*lists, rule=FUSED[0].rule, update=Update(step=2))
        ops.census(lists[1], torch.device("cpu"), with_norm=True)
    kept = [weakref.ref(tensor) for tensors in lists for tensor in tensors]
    del lists
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


@as_they_are
def test_threads_do_not_share_memory_that_is_kept(ops: Any, threads: Any) -> None:
    row = FUSED[0]
    threads(2)
    before = [lists_of(row, F32, BF16, F32, [(40, 3)] * 200 + [(200_000,)]) for _ in range(4)]
    for number, lists in enumerate(before):
        for tensor in lists[1]:
            tensor.mul_(number)
    wanted = [run(ops, row, lists, step=2) for lists in before]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda lists: run(ops, row, lists, step=2), 4 * before))
    for one, other in zip(ours, 4 * wanted, strict=True):
        for tensors, same in zip(one, other, strict=True):
            assert_kept(tensors, same)


# -- norms of larger tensors than the ones that are updated ----------------------------------------


def of_parts(row: RuleRow) -> tuple[Lists, torch.Tensor]:
    """Lists of a rule with norms, in all layouts, and norms that are not theirs."""
    kinds = 1 if row.rule.has_numbers else 2
    norms = torch.arange(1.0, 1.0 + kinds * len(SIZES)).view(kinds, -1)
    return anyhow(lists_of(row, F32, F32, F32)), norms


@pytest.mark.parametrize("row", WITH_NORMS, ids=lambda row: row.op)
def test_given_norms_are_taken(ops: Any, row: RuleRow) -> None:
    lists, norms = of_parts(row)
    told = {"step": 2, "inv_scale": torch.tensor(0.5), "norms": norms}
    ours, wanted = (run(one, row, lists, **told) for one in (ops, REFERENCE))
    for found, others in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found, others, rtol=2e-6, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours, run(ops, row, lists, step=2, inv_scale=told["inv_scale"]))


@pytest.mark.parametrize("row", WITH_NORMS, ids=lambda row: row.op)
def test_own_norms_given_change_nothing(ops: Any, row: RuleRow) -> None:
    """Told the norms that it would measure, a rule does what it does without."""
    lists, _ = of_parts(row)
    found = torch.stack([torch.stack([value.norm() for value in lists[n]]) for n in (0, 1)])
    norms = found[1:] if row.rule.has_numbers else found
    if row.op == "lamb_":
        halves = rounded(lists[0], BF16)  # whose values are those of both
        for told in (Update(step=3, halves=[2 * half for half in halves]), Update(step=3)):
            norms = lamb_norms(*lists, rule=row.rule, update=told)
            assert norms.shape == (2, len(SIZES))
    ours, wanted = (run(ops, row, lists, step=3, norms=given) for given in (norms, None))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)
