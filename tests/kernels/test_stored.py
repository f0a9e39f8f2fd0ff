# SPDX-License-Identifier: BSD-3-Clause
"""Lists that are kept in fewer bits: the formats by themselves, and in every back end's updates."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.back_ends import CUT, JIT, PLAIN, REFERENCE
from cases.rules import BF16, F16, F32, ONE_EACH, ROWS, RuleRow
from cases.selection import examples
from cases.stored import (
    LAYOUTS,
    SHAPES,
    STORAGES,
    Case,
    assert_bits,
    bits_of,
    chance,
    copied,
    spaced,
)
from preamp.kernels import Update, lamb_norms
from preamp.kernels.jit import formats
from preamp.kernels.stored import (
    BINADES,
    BLOCK,
    MANTISSA,
    ODD,
    Format,
    Stored,
    decode,
    encode,
    join,
    philox,
    round_by_chance,
    scales_shape,
    split,
)

every_back_end = pytest.mark.parametrize("ops", ["plain", "cut", "jit", "triton"], indirect=True)
each_language = pytest.mark.parametrize("ops", ["reference", "jit", "triton"], indirect=True)
compiled = pytest.mark.parametrize("ops", ["jit", "triton"], indirect=True)
every_storage = pytest.mark.parametrize(
    ("half", "kind"), STORAGES, ids=[f"{str(h).removeprefix('torch.')}-{k}" for h, k in STORAGES]
)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.name)
SGD = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum)
ADAM = next(row for row in ROWS if row.op == "adam_")
LAMB = next(row for row in ROWS if row.op == "lamb_" and row.rule.uses_trust_ratio)

FEW = ((17, 100), (2, 300), (9, 128), (2, 3, 3, 3), (0, 20))
"""For Triton's interpreter, and for what is cut into many pieces."""


def made(ops: Any, row: RuleRow, half: Any, kind: str, **told: Any) -> Case:
    """A case of as much as the back end can take in a test."""
    return Case.of(row, half, kind, **{"shapes": FEW if ops.name == "triton" else SHAPES, **told})


# -- split masters --------------------------------------------------------------------------------


def as_promised(values: torch.Tensor, half: torch.Tensor, low: torch.Tensor, again: Any) -> Any:
    """Which float32 values come back as `preamp.kernels.stored` promises."""
    is_same = bits_of(again) == bits_of(values)
    is_nan = half.isnan() & (low == 0)
    if half.dtype is BF16:
        rounded = (bits_of(values).long() + 0x8000) >> 16 & 0xFFFF
        is_rounded = bits_of(half).long() & 0xFFFF == rounded
        return torch.where(values.isnan(), is_nan, is_same & is_rounded)
    size, has_sign = values.double().abs(), half.signbit() == values.signbit()
    is_near = (values.double() - again.double()).abs() <= 2.0**-41
    good = torch.where(size >= 2.0**-14, is_same, is_near) & has_sign
    good = torch.where(size >= 65520, half.isinf() & (low == 0) & has_sign, good)
    return torch.where(values.isnan(), is_nan, good)


def lower_halves() -> torch.Tensor:
    """256 of them: edges, each bit alone and missing alone, and others."""
    alone = [1 << bit for bit in range(16)]
    edges = [0, 0x0FFF, 0x7FFF, 0x8001, 0xFFFF, *alone, *(0xFFFF ^ bit for bit in alone)]
    return torch.cat([torch.tensor(edges), torch.randint(0, 2**16, (256 - len(edges),))])


@pytest.mark.product
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("ops", ["plain", "jit"], indirect=True)
def test_float32_values_come_back(ops: Any, dtype: torch.dtype) -> None:
    """2**24 words, of which all exponents."""
    lower = lower_halves()
    for upper in torch.arange(-(2**15), 2**15).split(2**12):
        values = (upper[:, None] << 16 | lower).int().view(F32)
        half, low = torch.empty_like(values, dtype=dtype), torch.empty_like(values).short()
        again = torch.empty_like(values)
        ops.split_([values], [half], [low])
        ops.join_([half], [low], [again])
        assert as_promised(values, half, low, again).all()
    low += 16
    ops.join_([half], [low], [again])
    assert not as_promised(values, half, low, again).all(), "it can fail"


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_zero_that_was_written_is_zero(dtype: torch.dtype) -> None:
    half = torch.tensor([0.0, -0.0, 0.0, 0.0, 1.0], dtype=dtype)
    low = torch.tensor([-1, -(2**15), 0, 2, -1], dtype=torch.int16)
    found = join(half, low)
    assert found[:3].tolist() == [0.0] * 3
    assert torch.signbit(found[:3]).tolist() == [False, True, False]
    assert found[3] > 0
    assert 0.99 < found[4] <= 1
    again = torch.empty(5)
    JIT.join_([half], [low], [again])
    assert_bits([again], [found])


# -- chance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_has_the_published_values(
    counter: list[int], key: tuple[int, int], wanted: list[int]
) -> None:
    found = philox([torch.tensor([word]) for word in counter], key)
    assert [word.item() for word in found] == wanted


def test_noise_is_its_words_in_order() -> None:
    found = chance(8, step=0, seed=0, number=0)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert found.tolist() == [half for word in words for half in (word & 0xFFFF, word >> 16)]
    second = chance(8, step=0, seed=0, number=0, row=1)
    assert second.tolist() == [value * ODD % 2**16 for value in found.tolist()]


@pytest.mark.parametrize("start", [0, 1, 8, 13, 2**35 - 3])
def test_noise_goes_by_the_index_in_the_whole_tensor(start: int) -> None:
    whole = chance(100, start=start)
    assert torch.equal(chance(50, start=start + 37), whole[37:87])
    layout = formats.Layout(
        rows=np.ones(1, np.int64), lengths=np.ones(1, np.int64), by_chance=True,
        numbers=np.array([2], np.uint32), starts=np.array([start]), seed=np.uint32(1),
        step=np.uint32(1),
    )  # fmt: skip
    room = np.zeros(64, np.uint32)
    first = (formats.chances(0, 5, 95, room.ctypes.data, layout) - room.ctypes.data) // 2
    assert room.view(np.uint16)[first : first + 95].tolist() == whole[5:].tolist()


def test_bfloat16_rounds_by_chance_to_the_nearest_two() -> None:
    """Over all chances the mean is the value itself."""
    every = torch.arange(2**16, dtype=torch.int32)
    for value in (1.0, 1.001, -3.7e-5, 2.0**-130, 1e38):
        wide = torch.full((2**16,), value)
        found = round_by_chance(wide, every)
        unit = 2.0 ** (max(math.frexp(value)[1], -125) - 8)
        assert ((found.double() - wide.double()).abs() < unit).all()
        assert abs(found.double().mean() - wide[0].double()) <= unit * 2.0**-16
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    assert_bits([round_by_chance(odd, every[-4:])], [odd.to(BF16)])


# -- blocks of 8 bits -----------------------------------------------------------------------------

BITS8 = (Format.SIGNED, Format.UNSIGNED)


@given(
    shape=st.sampled_from([*SHAPES, (3, 1), (2, 257), (0, 20), (4, 2, 64)]),
    power=st.integers(-126, 127),
    spread=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(200))
@pytest.mark.parametrize("kind", BITS8)
def test_8_bits_are_within_a_step(
    kind: Format, shape: Any, power: int, spread: int, seed: int
) -> None:
    """Of a 32nd of the power of two below a value, or of the lowest one; zero stays zero."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.rand(shape, generator=random) * 0.98
    wide *= 2.0 ** -torch.randint(0, spread + 1, tuple(shape), generator=random)
    wide = (wide.double() * 2.0**power).float() * (wide > 0.05 * wide.mean())
    if kind is Format.SIGNED:
        wide *= torch.randint(0, 2, tuple(shape), generator=random) * 2 - 1
    codes, scales = encode(wide, kind, chance(wide.numel(), seed=seed))
    assert codes.dtype is kind.dtype
    assert codes.shape == wide.shape
    assert scales.shape == scales_shape(shape)
    found = decode(codes, scales, kind)
    of_each = scales.repeat_interleave(BLOCK, 1)[:, : math.prod(shape[1:])].reshape(shape)
    lowest = of_each.double() * 2.0 ** (2 - BINADES[kind])
    below = torch.exp2(torch.frexp(wide.double()).exponent - 1.0)
    step = torch.maximum(below, lowest) * 2.0**-MANTISSA
    assert ((found.double() - wide.double()).abs() < step + (step == 0)).all()
    assert (found * wide >= 0).all()
    assert (found[wide == 0] == 0).all()
    if kind is Format.UNSIGNED:
        assert (found[wide > 0] > 0).all()
    # What was kept is kept again as it is, whatever the chance.
    again = decode(*encode(found, kind, chance(wide.numel(), seed=seed + 1)), kind)
    assert torch.equal(again, found)


@pytest.mark.parametrize("kind", BITS8)
def test_8_bits_are_right_on_average(kind: Format) -> None:
    """Over all chances to a 2**-16th of a step; nothing above zero is zero, which is a bias."""
    every = torch.arange(2**16, dtype=torch.int32)
    sign = -1 if kind is Format.SIGNED else 1
    for value in (1.0, 0.7001, 0.031, 0.2504, 63 / 64, 1e-3, 1e-6):
        wide = torch.full((2**16, 2), sign * value)
        wide[:, 1] = 1.0  # says the scale
        codes, scales = encode(wide, kind, every.repeat_interleave(2))
        found = decode(codes, scales, kind)[:, 0].double()
        lowest = 2.0 ** (2 - BINADES[kind])
        step = max(2.0 ** math.floor(math.log2(value)), lowest) / 32
        allowed = step * 2.0**-15 + (step if kind is Format.UNSIGNED and value < step else 0.0)
        assert abs(found.mean() - wide[0, 0].double()) <= allowed
        assert len(found.unique()) <= 2


@pytest.mark.parametrize("kind", BITS8)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_nan(kind: Format, bad: float) -> None:
    wide = torch.ones(2, 200)
    wide[1, 150] = bad
    codes, scales = encode(wide, kind, chance(400))
    found = decode(codes, scales, kind)
    assert found[1, 128:].isnan().all()
    assert (found.flatten()[: 200 + 128] == 1).all()
    assert not scales[1, 1].isfinite()


# -- updates --------------------------------------------------------------------------------------

ULPS = 2.0**-19
"""What p may differ by, relative to the largest: formulas differ by ulps between back ends."""

SAME_MOMENTS = {"jit": ("adam_", "lamb_", "adagrad_", "sgd_"), "triton": ("adagrad_", "sgd_")}
"""Rules whose moments take the same operations there as in the definition."""


def assert_updated_alike(ours: Case, wanted: Case) -> None:
    """Parameters to ulps; state to ulps and one step of rounding, where it was on the edge."""
    for one, other in zip(ours.params, wanted.params, strict=True):
        assert ((one - other).abs() <= ULPS * (1 + other.abs())).all()
    for number, (column, others) in enumerate(zip(ours.state, wanted.state, strict=True)):
        kind = ours.stored.formats[number]
        for one, other in zip(column, others, strict=True):
            if not other.numel():
                continue
            largest, far = other.abs().max(), (one - other).abs()
            step = {Format.PLAIN: 0.0, Format.BFLOAT16: 2.0**-7}.get(kind, 2.0**-4)
            assert (far <= step * other.abs().clamp(min=0.05 * largest) + ULPS * largest).all()
            # Rounding went another way hardly anywhere.
            assert (far > ULPS * largest).sum() <= 2 + other.numel() / 500


@pytest.mark.parametrize("ops", ["plain", "cut", "jit"], indirect=True)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@every_storage
def test_updates_are_the_reference(ops: Any, row: RuleRow, half: Any, kind: str) -> None:
    case = made(ops, row, half, kind)
    ours, wanted = case.run(ops), case.run(REFERENCE)
    assert_updated_alike(ours, wanted)
    if ops is PLAIN and kind == "float32":
        return  # torch's fused kernels; see the next test
    if ops is CUT and row.rule.takes_norms:
        return  # norms of pieces, whose squares are added up in another order
    if ops in (PLAIN, CUT) or (ops is JIT and row.op == "sgd_"):
        assert_bits(ours.kept, wanted.kept)
    elif row.op in SAME_MOMENTS[ops.name]:
        assert_bits(ours.kept_state, wanted.kept_state)
    with pytest.raises(AssertionError):  # and something has happened
        assert_bits(ours.kept, case.kept)


# The interpreter is slow: it runs one row of each rule.
@pytest.mark.parametrize("ops", ["triton"], indirect=True)
@pytest.mark.parametrize(
    "row", ROWS if torch.cuda.is_available() else ONE_EACH, ids=lambda row: row.name
)
@every_storage
def test_updates_of_triton_are_the_reference(ops: Any, row: RuleRow, half: Any, kind: str) -> None:
    test_updates_are_the_reference(ops, row, half, kind)


SPLIT_ROWS = [row for row in ROWS if row.op != "lars_"]  # which has masters made for each step


@every_back_end
@pytest.mark.parametrize("half", [BF16, F16])
@pytest.mark.parametrize("row", SPLIT_ROWS, ids=lambda row: row.name)
def test_split_parameters_have_the_bits_of_float32_ones(ops: Any, row: RuleRow, half: Any) -> None:
    """One rule rounds in one way, whatever its parameters are kept as at the moment."""
    slow = ops is CUT or ops.name == "triton"
    shapes = FEW if slow else (*SHAPES, (70_001,))
    case = Case.of(row, half, "float32", shapes=shapes)
    wide = replace(case, lists=copied([case.params, *case.lists[1:]]), stored=Stored())
    halves = [param.to(half) for param in case.params]
    ours, wanted = case.run(ops), wide.run(ops, halves=halves)
    parts = [split(tensor, half) for tensor in wanted.lists[0]]
    assert_bits(ours.lists[0], [part[0] for part in parts])
    assert_bits(ours.stored.lows or [], [part[1] for part in parts])
    assert_bits([t for c in ours.lists[2:] for t in c], [t for c in wanted.lists[2:] for t in c])


@every_storage
@one_each
def test_updates_are_those_of_what_was_kept(row: RuleRow, half: Any, kind: str) -> None:
    """A plain update of the float32 values, rounded."""
    case = Case.of(row, half, kind)
    plain = [case.params, case.lists[1], *case.state, *case.lists[2 + len(case.state) :]]
    plain = [[tensor.clone() for tensor in column] for column in plain]
    if row.rule.leaves_state:
        plain = plain[:3]
    told = Update(step=3, inv_scale=torch.tensor(0.5))
    REFERENCE.update_(*plain, rule=row.rule, update=told)
    found = case.run(REFERENCE)
    for one, other in zip(found.params, plain[0], strict=True):
        if half is F16:
            assert ((one - other).abs() <= 2.0**-41).all()
        else:
            assert torch.equal(one, other)
    for column, others in zip(found.state, plain[2:], strict=False):
        for one, other in zip(column, others, strict=True):
            largest = other.abs().max()
            assert ((one - other).abs() <= 2.0**-5 * other.abs() + 2.0**-5 * largest).all()


@every_back_end
@every_storage
def test_a_skipped_step_keeps_every_bit(ops: Any, half: Any, kind: str) -> None:
    case = made(ops, ADAM, half, kind)
    case.lists[1][0][0, 0] = torch.nan
    assert_bits(case.run(ops, found_inf=torch.ones(())).kept, case.kept)
    taken = case.run(ops, found_inf=torch.zeros(()))
    assert taken.params[0][0, 0].isnan()
    assert_bits(taken.kept, case.run(ops).kept)


@every_back_end
@every_storage
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_kept_alike(ops: Any, half: Any, kind: str, bad: float) -> None:
    case = made(ops, ADAM, half, kind)
    case.lists[1][1][0, 200] = bad
    ours, wanted = case.run(ops), case.run(REFERENCE)
    if ops.name != "triton" and (ops is not PLAIN or kind != "float32"):
        assert_bits(ours.kept_state, wanted.kept_state)
    assert [p.isfinite().tolist() for p in ours.params] == [
        p.isfinite().tolist() for p in wanted.params
    ]
    lost = ~ours.state[0][1].isfinite()
    assert int(lost.sum()) == (BLOCK if kind == "8bit" else 1)
    assert lost[0, 200]


@compiled
@pytest.mark.parametrize("half", [BF16, F16])
def test_any_words_come_back_from_an_update(ops: Any, half: Any) -> None:
    """Without a gradient nothing moves, whatever the words: the bits are the reference's."""
    case = made(ops, SGD, half, "float32", shapes=[(3, 1500)])
    words = torch.randint(-(2**31), 2**31, (1500,), generator=torch.Generator().manual_seed(1))
    weights, lows = case.lists[0][0], (case.stored.lows or [])[0]
    weights[0] = words.int().view(half)[::2]
    lows[0] = words.int().view(torch.int16)[::2]
    lows[1] = -(2**15)
    weights[1, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan], dtype=half)
    if half is F16:  # half way between two, and below the normal range
        weights[2] = (torch.arange(1500) * 2.0**-24).to(half)
        lows[2, ::2] = 2**15 - 1
        lows[2, 1::2] = -(2**15)
    case.lists[1][0].zero_()
    case.lists[2][0].zero_()
    assert_bits(case.run(ops).kept, case.run(REFERENCE).kept)


@compiled
@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_moments_that_are_odd(ops: Any, kind: str) -> None:
    """Infinite, nan, negative zero, below the normal range, and near the end of the range."""
    values = [torch.inf, -torch.inf, torch.nan, 1e-41, -1e-38, 3.39e38, -3.4e38, -0.0, 1e-30]
    case = made(ops, SGD, None, kind, shapes=[(len(values), 300)])
    case.lists[0][0].zero_()
    case.lists[1][0] = torch.zeros(len(values), 300)
    case.lists[1][0][:, 7] = torch.tensor(values)
    case.lists[1][0][:, 130:] = torch.tensor(values)[:, None] * 0.37
    for step in (1, 2):
        told: Any = {"inv_scale": torch.ones(()), "step": step}
        ours, wanted = case.run(ops, **told), case.run(REFERENCE, **told)
        assert_bits(ours.kept_state, wanted.kept_state)
        case = replace(ours, lists=[ours.lists[0], case.lists[1], *ours.lists[2:]])


@compiled
@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_chance_goes_by_the_whole_tensor(ops: Any, kind: str) -> None:
    """By its step, on the device too, and by where a part starts, far and at any element."""
    case = made(ops, SGD, BF16, kind)
    for start in (5, 2**35 + 8):
        starts = [start + 16 * i for i in range(len(case.lists[0]))]
        numbers = [2**31 - 1 - i for i in range(len(starts))]
        stored = replace(case.stored, starts=starts, seed=2**32 - 1, numbers=numbers)
        moved = replace(case, stored=stored)
        wanted = moved.run(REFERENCE, step=7)
        for step in (7, torch.tensor(7)):
            assert_bits(moved.run(ops, step=step).kept, wanted.kept)
        with pytest.raises(AssertionError):
            assert_bits(moved.run(ops, step=8).kept, wanted.kept)


@each_language
@every_storage
def test_rows_by_themselves_have_the_bits_of_the_whole(ops: Any, half: Any, kind: str) -> None:
    """As the ranks of a sharded model have them."""
    case = Case.of(ADAM, half, kind)
    whole = case.run(ops)
    for place in ((0, 3), (3, 4), (4, None)):
        slices = [slice(*place)] * len(SHAPES)
        assert_bits(case.part(slices).run(ops).kept, whole.part(slices).kept)


@every_storage
def test_norms_are_those_of_what_was_kept(half: Any, kind: str) -> None:
    case = Case.of(LAMB, half, kind)
    told = Update(step=3, inv_scale=torch.tensor(0.5), stored=case.stored)
    before = [tensor.clone() for tensor in case.kept]
    found = lamb_norms(*case.lists, rule=LAMB.rule, update=told)
    assert_bits(case.kept, before)
    wide = [case.params, case.lists[1], *case.state]
    wanted = lamb_norms(*wide, rule=LAMB.rule, update=replace(told, stored=None))
    torch.testing.assert_close(found, wanted, rtol=4e-6, atol=0)


@every_back_end
@every_storage
@pytest.mark.parametrize("layout", [*LAYOUTS, None], ids=lambda one: getattr(one, "__name__", one))
def test_tensors_that_lie_anyhow(ops: Any, half: Any, kind: str, layout: Any, threads: Any) -> None:
    """In one layout or in all by turns; what no kernel can walk has its own lows and scales."""
    turns = itertools.cycle(LAYOUTS)
    case = made(ops, SGD, half, kind, layout=layout or (lambda tensor: next(turns)(tensor)))
    wanted = made(ops, SGD, half, kind).run(REFERENCE)
    threads(3)
    assert_bits(case.run(ops).kept, wanted.kept)
    if kind == "8bit" and layout is None:
        scales = [*(case.stored.scales[0] or [])]
        scales[2] = spaced(scales[2])
        case.stored = replace(case.stored, scales=(scales,))
        assert_bits(case.run(ops).kept, wanted.kept)


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_any_number_of_threads_has_the_same_bits(threads: Any, kind: str) -> None:
    case = Case.of(ADAM, BF16, kind, shapes=((300, 700), (3, 100_000), (2, 17000), (7, 20)))
    threads(1)
    wanted = case.run(JIT)
    for count in (2, 3, 8):
        threads(count)
        assert_bits(case.run(JIT).kept, wanted.kept)


@each_language
@every_storage
@one_each
def test_versions_rise_for_what_is_written(ops: Any, row: RuleRow, half: Any, kind: str) -> None:
    case = made(ops, row, half, kind)
    written = case.kept
    if row.rule.leaves_state:
        written = [*case.lists[0], *(case.stored.lows or [])]
    elif row.rule.has_numbers:
        written = [tensor for tensor in written if tensor.dim()]
    written = [tensor for tensor in written if tensor.numel()]
    before = [tensor._version for tensor in written]
    told = Update(step=2, stored=case.stored)
    ops.update_(*case.lists, rule=row.rule, update=told)
    assert all(t._version > was for t, was in zip(written, before, strict=True))
    assert {tensor._version for tensor in case.lists[1]} == {0}


@compiled
def test_gradients_of_any_dtype(ops: Any) -> None:
    for half in (BF16, F16):
        for grads in (BF16, F16, F32):
            case = made(ops, SGD, half, "8bit")
            case.lists[1] = [tensor.to(grads) for tensor in case.lists[1]]
            assert_bits(case.run(ops).kept, case.run(REFERENCE).kept)


@each_language
def test_momentum_that_is_not_used_is_left_alone(ops: Any) -> None:
    row = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum == 0)
    case = made(ops, row, BF16, "8bit")
    assert_bits(case.run(ops).kept_state, case.kept_state)


# -- what does not fit ----------------------------------------------------------------------------


def _bad() -> dict[str, Stored]:
    good = Case.of(ADAM, BF16, "8bit").stored
    lows, (signed, unsigned) = list(good.lows or []), good.scales
    assert signed is not None
    return {
        "fewer lows": replace(good, lows=lows[1:]),
        "lows of other shapes": replace(good, lows=[low.transpose(0, 1) for low in lows]),
        "fewer scales": replace(good, scales=(signed[1:], unsigned)),
        "scales of other shapes": replace(good, scales=([s[1:] for s in signed], unsigned)),
    }


@pytest.mark.parametrize("ops", [REFERENCE, JIT])
@pytest.mark.parametrize("name", _bad())
def test_what_does_not_fit_is_refused(ops: Any, name: str) -> None:
    case = replace(Case.of(ADAM, BF16, "8bit"), stored=_bad()[name])
    before = [tensor.clone() for tensor in case.kept]
    with pytest.raises(ValueError, match=r"(?s)Lists|shape.*\..*\."):
        ops.update_(*case.lists, rule=ADAM.rule, update=Update(step=1, stored=case.stored))
    assert_bits(case.kept, before)
