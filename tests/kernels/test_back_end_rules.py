# SPDX-License-Identifier: BSD-3-Clause
"""The update rules of every back end, against float64."""

import gc
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.back_ends import AS_THEY_ARE, REFERENCE, as_they_are, defaults, here
from cases.exact import Exact, assert_within_ulps
from cases.layouts import LAYOUTS
from cases.rules import BF16, F16, F32, F64, FUSED, ONE_EACH, ORACLES, ROWS, SIGNATURES, RuleRow
from cases.selection import examples
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp.core.dtypes import math_dtype
from preamp.kernels import Update
from preamp.kernels.rules import RULES, AdamRule, BiasCorrection, LambRule, LarsRule, NovoGradRule

ULPS = 4
"""What the op table allows. Rounding on store is one half of one."""

ULPS_WITH_NORMS = 16
"""A sum of many squares depends on its order; each back end has its own."""

SIZES = ((), (0,), (1,), (7,), (41,), (3, 0, 2), (11, 13), (2, 3, 4, 5))
EDGES = tuple(block + by for block in (1 << 16, 1 << 18) for by in (-1, 0, 1))

EDGES_OF_CHUNKS = (1024, 8191, 8192, 8193)
"""Of those of Triton's kernels."""

BITS = {F16: torch.int16, BF16: torch.int16, F32: torch.int32, F64: torch.int64}

UNCORRECTED = ("adam_-none", "lamb_-grad_averaging-uses_trust_ratio", "novograd_-grad_averaging")
READ_ON_DEVICE = (*ONE_EACH, *(row for row in ROWS if row.name in UNCORRECTED))
"""Each op, and each way to use a bias correction, or none."""

Lists = list[list[torch.Tensor]]

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)
every_signature = pytest.mark.parametrize(
    "dtypes", SIGNATURES, ids=lambda s: "-".join(str(d).removeprefix("torch.") for d in s)
)


def draw(seed: int, dtype: torch.dtype, shapes: Sequence[Any] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def state_of(row: RuleRow, dtype: torch.dtype, shapes: Sequence[Any] = SIZES) -> Lists:
    """State as after some steps; norms of every other tensor as before the first."""
    lists = [draw(20 + index, dtype, shapes) for index in range(row.states)]
    if row.op == "novograd_":
        values = (0.5 + index if index % 2 else -1.0 for index in range(len(shapes)))
        lists[-1] = [torch.tensor(value, dtype=dtype) for value in values]
    elif row.op not in ("sgd_", "lars_", "lion_"):
        lists[-1] = [value.abs() for value in lists[-1]]
    return lists


def lists_of(
    row: RuleRow, p: torch.dtype, g: torch.dtype, s: torch.dtype, shapes: Sequence[Any] = SIZES
) -> Lists:
    return [draw(1, p, shapes), draw(2, g, shapes), *state_of(row, s, shapes)]


def rounded(params: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Any]:
    """The half weights of some parameters."""
    return [param.to(dtype, copy=True) for param in params]


def copy(lists: Sequence[Sequence[torch.Tensor]]) -> Lists:
    """Copies in the same layouts, gaps between elements included."""
    return [[_copy(tensor) for tensor in row] for row in lists]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run(ops: Any, row: RuleRow, lists: Lists, rule: Any = None, **update: Any) -> Lists:
    """Update copies of ``lists``; returns them."""
    lists = copy(lists)
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


def assert_bits(ours: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Nothing has changed, payloads of nan and signs of zeros included."""
    for one, old in zip(ours, before, strict=True):
        assert torch.equal(one.view(BITS[one.dtype]), old.view(BITS[old.dtype]))


def test_every_rule_has_rows_and_an_oracle() -> None:
    assert {type(row.rule) for row in ROWS} == set(RULES)
    assert set(ORACLES) == {row.op for row in ROWS}


# -- formulas ----------------------------------------------------------------------------------


@every_signature
@every_row
def test_rules_are_their_formulas(ops: Any, row: RuleRow, dtypes: tuple[Any, ...]) -> None:
    p, g, s, h = dtypes
    before = lists_of(row, p, g, s)
    halves = None if h is None else rounded(before[0], h)
    ours = run(ops, row, before, step=3, inv_scale=torch.tensor(0.3), halves=halves)
    assert_exact(row, ours, before, step=3, scale=torch.tensor(0.3).item())
    for param, half in zip(ours[0], halves or (), strict=False):
        assert_same(half, param.to(half.dtype), "a half is its rounded parameter")


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
    ours = run(ops, row, before, rule, step=step)
    assert_exact(row, ours, before, rule, step)
    on_device = replace(row.rule, lr=rate)
    for counter in (torch.int64, torch.int32):
        ours = run(
            ops,
            row,
            before,
            on_device,
            step=torch.tensor(step, dtype=counter),
            inv_scale=torch.tensor(1.0, dtype=dtype),
            found_inf=torch.zeros(()),
        )
        assert_exact(row, ours, before, rule, step)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_corrections_keep_their_digits(ops: Any, dtype: torch.dtype) -> None:
    """``1 - 0.999**step`` has lost half of them in float32."""
    for step in (1, 2, 100, 692, 694, 10000):
        rule = AdamRule(
            **{"lr": 0.1, "beta1": 0.0, "beta2": 0.999, "eps": 0.0, "weight_decay": 0.0},
            decoupled=True,
            bias_correction=BiasCorrection.MOMENTS,
        )
        ones = [[torch.ones(3, dtype=dtype)] for _ in range(4)]
        ones[3][0].zero_()
        ops.update_(*ones, rule=rule, update=Update(step=torch.tensor(step)))
        change = 0.1 / math.sqrt((1 - 0.999) / -math.expm1(step * math.log(0.999)))
        digits = 8 * torch.finfo(dtype).eps
        assert ones[0][0].tolist() == pytest.approx([1 - change] * 3, abs=digits * (1 + change))


@pytest.mark.parametrize("row", [r for r in ROWS if getattr(r.rule, "uses_trust_ratio", False)])
@pytest.mark.parametrize("zero", [(0,), (1,), (0, 1)], ids=["weights", "gradients", "both"])
def test_a_norm_of_zero_has_no_ratio(ops: Any, row: RuleRow, zero: tuple[int, ...]) -> None:
    before = lists_of(row, F32, F32, F32)
    for number in (*zero, 2):
        before[number] = [torch.zeros_like(tensor) for tensor in before[number]]
    assert_exact(row, run(ops, row, before), before)


@pytest.mark.parametrize("momentum", [torch.nan, 1.0])
def test_buffers_without_momentum_are_not_touched(ops: Any, momentum: float) -> None:
    row = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum == 0)
    before = lists_of(row, F32, F32, BF16)
    before[2] = [torch.full_like(tensor, momentum) for tensor in before[2]]
    assert_bits(run(ops, row, before, step=2)[2], before[2])


@pytest.mark.parametrize("row", [row for row in ROWS if row.op == "novograd_"])
def test_a_norm_of_zero_is_a_norm(ops: Any, row: RuleRow) -> None:
    """Only a negative one means that there is none yet."""
    before = lists_of(row, F32, F32, F32)
    before[3] = [torch.zeros(()) for _ in SIZES]
    assert_exact(row, run(ops, row, before, step=2), before, step=2)


# -- skipping ----------------------------------------------------------------------------------


@every_signature
@one_each
def test_no_overflow_changes_nothing(ops: Any, row: RuleRow, dtypes: tuple[Any, ...]) -> None:
    p, g, s, h = dtypes
    before = lists_of(row, p, g, s)
    kept = [None] * len(SIZES) if h is None else draw(3, h)
    found: list[Lists] = []
    for flag in (None, torch.zeros(())):
        halves = [None if half is None else half.clone() for half in kept]
        found.append(run(ops, row, before, step=2, found_inf=flag, halves=halves))
        found[-1].append([half for half in halves if half is not None])
    for ours, wanted in zip(*found, strict=True):
        assert_bits(ours, wanted)


@pytest.mark.threes
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1.0])
@every_signature
@one_each
def test_an_overflow_keeps_every_bit(
    ops: Any, row: RuleRow, dtypes: tuple[Any, ...], bad: float
) -> None:
    p, g, s, h = dtypes
    before = lists_of(row, p, g, s)
    before[1] = [tensor.fill_(bad) for tensor in before[1]]
    for number, tensors in enumerate([before[0], *before[2:]]):
        spoiled = [tensor.view(-1) for tensor in tensors if tensor.numel()]
        spoiled[number][0] = -0.0
        spoiled[3].view(BITS[spoiled[3].dtype])[0] = -1  # a nan that no arithmetic gives
    halves: list[Any] = [None] * len(SIZES) if h is None else draw(3, h)
    halves[0] = None
    kept = [half.clone() for half in halves if half is not None]
    options = {"inv_scale": torch.tensor(0.5), "halves": halves}
    for step, flag in ((1, 2.0), (torch.tensor(1), math.nan)):  # of two ranks, summed; of any kind
        ours = run(ops, row, before, step=step, found_inf=torch.tensor(flag), **options)
        for one, old in zip(ours, before, strict=True):
            assert_bits(one, old)
        assert_bits([half for half in halves if half is not None], kept)


@pytest.mark.parametrize("flag", [None, 0.0, 1.0])
@every_row
def test_halves_of_several_dtypes(ops: Any, row: RuleRow, flag: float | None) -> None:
    """Tensors that share a block: 1e30 is infinite in float16, 1 + 2**-9 is 1 in bfloat16."""
    shapes = ((3,), (4,), (5,), (6,))
    before = lists_of(row, F32, F32, F32, shapes)
    before[0][1].fill_(1e30)
    before[1][1].zero_()
    dtypes = F16, BF16, BF16, F32
    halves = [param.to(dtype) for param, dtype in zip(before[0], dtypes, strict=True)]
    wanted = [half.clone() for half in halves]
    found_inf = None if flag is None else torch.tensor(flag)
    ours = run(ops, row, before, step=2, found_inf=found_inf, halves=halves)
    if not flag:
        wanted = [param.to(half.dtype) for param, half in zip(ours[0], halves, strict=True)]
    for half, want in zip(halves, wanted, strict=True):
        # Processors round nan to different bits.
        known = (
            half.isnan() & want.isnan() if not flag else torch.zeros_like(half, dtype=torch.bool)
        )
        assert_bits([half.masked_fill(known, 0)], [want.masked_fill(known, 0)])


@one_each
def test_a_bad_gradient_spoils_its_own_tensors_only(ops: Any, row: RuleRow) -> None:
    before = lists_of(row, F32, F32, F32)
    before[1][4][40] = math.nan
    ours, wanted = (run(back_end, row, before, step=3) for back_end in (ops, REFERENCE))
    for place, (one, other) in enumerate(zip(ours[0], wanted[0], strict=True)):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert bool(one.isfinite().all()) == (place != 4)


# -- layouts -----------------------------------------------------------------------------------


@pytest.mark.threes
@pytest.mark.parametrize("grads", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("params", LAYOUTS, ids=lambda layout: layout.__name__)
@one_each
def test_layouts_do_not_matter(ops: Any, row: RuleRow, params: Any, grads: Any) -> None:
    """State and halves lie as the gradients do, so that both orders meet in each rule."""
    before = lists_of(row, F32, F16, F32)
    before[0] = list(map(params, before[0]))
    before[1:] = [list(map(grads, tensors)) for tensors in before[1:]]
    halves = list(map(grads, rounded(before[0], BF16)))
    ours = run(ops, row, before, step=2, found_inf=torch.zeros(()), halves=halves)
    assert_exact(row, ours, before, step=2)
    for param, half, old in zip(ours[0], halves, before[0], strict=True):
        assert_same(half, param.to(BF16))
        assert param.stride() == old.stride()


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
    for param, half in zip(ours[0], halves, strict=True):
        assert_same(half, param.to(BF16))


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
    shapes = [(index % 4,) for index in range(4_000)]
    before = lists_of(row, F32, F16, F32, shapes)
    joined = [[torch.cat(tensors)] for tensors in before]
    halves = rounded(before[0], F16)
    ours = run(ops, row, before, step=2, halves=halves)
    assert_exact(row, [[torch.cat(tensors)] for tensors in ours], joined, step=2)
    assert_same(torch.cat(halves), torch.cat(ours[0]).half())


@pytest.mark.parametrize("shape", [(2,), (1, 40), (40,)], ids=str)
@one_each
def test_state_of_another_shape_is_refused(ops: Any, row: RuleRow, shape: Any) -> None:
    """As of another model's checkpoint; torch's fused kernels would read past its end."""
    lists = lists_of(row, F32, F32, F32, [(3,), (40, 1), (3,)])
    lists[2][1] = torch.ones(shape)
    before = copy(lists)
    with refused("kernels", "a state of another shape", shape=shape, number=1, wanted=(40, 1)):
        ops.update_(*lists, rule=row.rule, update=Update(step=2))
    for ours, old in zip(lists, before, strict=True):
        assert_bits(ours, old)


@one_each
def test_lists_of_unequal_length_are_refused(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32, [(2,), (2,)])
    before = copy(lists)
    lists[1].pop()
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter|^Lists of 2, 1, "):
        ops.update_(*lists, rule=row.rule, update=Update())
    assert_bits(lists[0], before[0])


@one_each
def test_writes_are_noticed_by_autograd(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32)
    lists[0] = [param.clone().requires_grad_() for param in lists[0]]
    loss = (lists[0][4] * lists[0][4]).sum()
    versions = [[tensor._version for tensor in each] for each in lists[:2]]
    ops.update_(*lists, rule=row.rule, update=Update())
    later = [[tensor._version for tensor in each] for each in lists[:2]]
    assert later[1] == versions[1]
    changes = zip(lists[0], later[0], versions[0], strict=True)
    assert all(new > old for param, new, old in changes if param.numel())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@one_each
def test_no_tensors_at_all(ops: Any, row: RuleRow) -> None:
    ops.update_(*([] for _ in range(2 + row.states)), rule=row.rule, update=Update())


@here
@every_row
def test_defaults_of_the_process_do_not_matter(ops: Any, row: RuleRow) -> None:
    """A step of 301 is none in bfloat16; "meta" stands for a GPU beside parameters on the CPU."""
    before = lists_of(row, F32, BF16, F32)
    options = {"step": 301, "inv_scale": torch.tensor(0.3), "found_inf": torch.zeros(())}
    wanted = run(ops, row, before, **options)
    for dtype, device in ((BF16, "cpu"), (F64, "cpu"), (F32, "meta")):
        lists = copy(before)
        with defaults(dtype, device):
            ops.update_(*lists, rule=row.rule, update=Update(**options))
        for ours, exact in zip(lists, wanted, strict=True):
            assert_bits(ours, exact)


@one_each
def test_no_history_is_recorded(ops: Any, row: RuleRow) -> None:
    lists = lists_of(row, F32, F32, F32)
    params = [torch.nn.Parameter(tensor) for tensor in lists[0]]
    grads = [tensor.requires_grad_() * 1 for tensor in lists[1]]
    rate = torch.tensor(0.1, requires_grad=True)
    ops.update_(
        *(params, grads, *lists[2:]), rule=replace(row.rule, lr=rate), update=Update(step=2)
    )
    for tensor in (*params, *(tensor for each in lists[2:] for tensor in each)):
        assert tensor.grad_fn is None
        assert tensor.is_leaf
    assert all(param.requires_grad for param in params)


# -- everything at once ------------------------------------------------------------------------

dtypes_ = st.sampled_from([F16, BF16, F32, F64])
shapes_ = st.lists(st.sampled_from([(), (0,), (1,), (5,), (31, 2), (97,), (2, 3, 4, 2)]))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.sampled_from(ROWS),
    dtypes=st.tuples(dtypes_, dtypes_, dtypes_, st.lists(st.none() | dtypes_, max_size=8)),
    shapes=shapes_,
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=8, max_size=8),
    step=st.integers(1, 20),
    scale=st.none() | st.sampled_from([2.0**-16, 0.1, 1.0, 3.0]),
    is_tensor=st.booleans(),
    flag=st.sampled_from([None, 0.0, 1.0]),
)
def test_any_rule_on_any_tensors(
    ops: Any,
    row: RuleRow,
    dtypes: tuple[Any, ...],
    shapes: list[Any],
    layouts: list[Any],
    step: int,
    scale: float | None,
    is_tensor: bool,
    flag: float | None,
) -> None:
    *kinds, halves = dtypes
    before = lists_of(row, *kinds, shapes)
    before = [
        [layouts[(number + place) % 8](tensor) for place, tensor in enumerate(tensors)]
        for number, tensors in enumerate(before)
    ]
    wanted = [halves[place % len(halves)] if halves else None for place in range(len(shapes))]
    into = [
        None if h is None else param.to(h, copy=True)
        for h, param in zip(wanted, before[0], strict=True)
    ]
    (kept,) = copy([[half for half in into if half is not None]])
    ours = run(
        ops,
        row,
        before,
        step=torch.tensor(step) if is_tensor else step,
        inv_scale=None if scale is None else torch.tensor(scale),
        found_inf=None if flag is None else torch.tensor(flag),
        halves=into,
    )
    if flag:
        assert_bits([t for each in ours for t in each], [t for each in before for t in each])
        assert_bits([half for half in into if half is not None], kept)
        return
    assert_exact(
        row, ours, before, None, step, 1.0 if scale is None else torch.tensor(scale).item()
    )
    for param, half in zip(ours[0], into, strict=True):
        if half is not None:
            assert_same(half, param.to(half.dtype))


# -- lists that were seen before -----------------------------------------------------------------


@as_they_are
@pytest.mark.parametrize("change", ["layout", "dtype", "shape", "none"])
def test_lists_seen_before_are_looked_at_again(ops: Any, change: str) -> None:
    """What is kept of them may not hide what was assigned to ``data`` in between."""
    row, shapes = FUSED[0], [(4, 6), (3,), (5, 2), (3,)]
    lists = lists_of(row, F32, F32, F32, shapes)
    options: dict[str, Any] = {"step": 2, "inv_scale": torch.tensor(0.5)}
    for _ in range(3):  # guards are made at the second call
        ops.update_(*lists, rule=row.rule, update=Update(**options))
    moment = lists[2][0]
    if change == "layout":
        moment.data = moment.data.t().contiguous().t()
    elif change == "dtype":
        moment.data = moment.data.double()
    elif change == "shape":
        moment.data = moment.data.view(6, 4)
        words = {"shape": (6, 4), "number": 0, "wanted": (4, 6)}
        with refused("kernels", "a state of another shape", **words):
            ops.update_(*lists, rule=row.rule, update=Update(**options))
        return
    before = copy(lists)
    ops.update_(*lists, rule=row.rule, update=Update(**options))
    assert_exact(row, lists, before, step=2, scale=0.5)


@as_they_are
def test_what_is_kept_of_lists_keeps_no_tensor_alive(ops: Any) -> None:
    row = FUSED[0]
    lists = lists_of(row, F32, BF16, F32, [(11,), (12,)])
    for _ in range(3):
        ops.update_(*lists, rule=row.rule, update=Update(step=2))
        ops.census(lists[1], torch.device("cpu"), with_norm=True)
    kept = [weakref.ref(tensor) for tensors in lists for tensor in tensors]
    del lists
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


@as_they_are
def test_threads_do_not_share_memory_that_is_kept(ops: Any) -> None:
    row = FUSED[0]
    before = [lists_of(row, F32, BF16, F32, [(40, 3)] * 200) for _ in range(4)]
    for number, lists in enumerate(before):
        for tensor in lists[1]:
            tensor.mul_(number)
    wanted = [run(ops, row, lists, step=2) for lists in before]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda lists: run(ops, row, lists, step=2), before))
    for one, other in zip(ours, wanted, strict=True):
        for tensors, same in zip(one, other, strict=True):
            assert_bits(tensors, same)


# -- norms of larger tensors than the ones that are updated -----------------------------------


SHAPES = ((3, 5), (0,), (1200,), (7,))
LAMB = LambRule(
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=1e-6,
    weight_decay=0.01,
    decoupled=True,
    bias_correction=True,
    grad_averaging=True,
    uses_trust_ratio=True,
)
LARS = LarsRule(
    lr=0.1,
    momentum=0.9,
    weight_decay=0.01,
    nesterov=False,
    trust_coefficient=0.02,
    eps=1e-8,
    uses_trust_ratio=True,
)
NOVOGRAD = NovoGradRule(
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.01,
    bias_correction=True,
    grad_averaging=True,
    decays_inside_moment=False,
    uses_max_norm=False,
)
NORM_RULES = {"lamb_": (LAMB, 2, 2), "lars_": (LARS, 1, 2), "novograd_": (NOVOGRAD, 1, 1)}


def lists(states: int, *, odd: bool = False) -> list[list[torch.Tensor]]:
    """Parameters, gradients and state; with ``odd``, one gradient lies in another order."""
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(2 + states)]
    rows[2:] = [[value.abs() for value in row] for row in rows[2:]]
    if odd:
        rows[1][0] = rows[1][0].t().contiguous().t()
    return rows


def run_given(ops: Any, op: str, *, odd: bool) -> list[torch.Tensor]:
    rule, states, kinds = NORM_RULES[op]
    rows = lists(states, odd=odd)
    if op == "novograd_":
        rows.append([torch.tensor(value) for value in (-1.0, -1.0, 2.0, 3.0)])
    norms = torch.arange(1.0, 1.0 + kinds * len(SHAPES)).view(kinds, -1)
    update = Update(inv_scale=torch.tensor(0.5), norms=norms)
    ops.update_(*rows, rule=rule, update=update)
    return [tensor for place, row in enumerate(rows) if place != 1 for tensor in row]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("op", NORM_RULES)
def test_given_norms_are_taken(ops: Any, op: str, odd: bool) -> None:
    pairs = zip(run_given(ops, op, odd=odd), run_given(REFERENCE, op, odd=odd), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("odd", [False, True])
def test_measured_norms(ops: Any, odd: bool) -> None:
    rows = lists(2, odd=odd)
    update = Update(step=3, inv_scale=torch.tensor(0.5))
    found = ops.lamb_norms(*rows, rule=LAMB, update=update)
    assert found.shape == (2, len(SHAPES))
    assert float(found[:, 1].abs().max()) == 0.0
    wanted = REFERENCE.lamb_norms(*rows, rule=LAMB, update=update)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("op", NORM_RULES)
def test_own_norms_given_change_nothing(ops: Any, op: str) -> None:
    """Told the norms that it would measure, a rule does what it does without."""
    rule, states, _ = NORM_RULES[op]
    results: list[list[torch.Tensor]] = []
    for is_given in (True, False):
        rows = lists(states)
        measured = [torch.stack([value.norm() for value in rows[place]]) for place in (0, 1)]
        norms = {"lars_": torch.stack(measured), "novograd_": measured[1][None]}.get(op)
        if op == "novograd_":
            rows.append([torch.tensor(2.0) for _ in SHAPES])
        if op == "lamb_":
            norms = ops.lamb_norms(*rows, rule=rule, update=Update())
        ops.update_(*rows, rule=rule, update=Update(norms=norms if is_given else None))
        results.append([tensor for row in rows for tensor in row])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
