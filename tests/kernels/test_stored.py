# SPDX-License-Identifier: BSD-3-Clause
"""Lists that are kept in fewer bits: the formats by themselves, and in the updates."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.back_ends import CUT, JIT, PLAIN, REFERENCE
from cases.rules import BF16, F16, F32, ONE_EACH, ROWS, RuleRow
from cases.selection import examples
from cases.stored import LAYOUTS, SHAPES, STORAGES, Case, assert_bits, chance, copied, spaced
from kit.refusals import refused
from preamp.kernels import Update
from preamp.kernels.checks import check_stored
from preamp.kernels.jit import compiler, formats, words
from preamp.kernels.rules import SgdRule
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

BACK_ENDS = {"plain": PLAIN, "cut": CUT, "jit": JIT}
every_back_end = pytest.mark.parametrize("ops", BACK_ENDS.values(), ids=BACK_ENDS)
every_storage = pytest.mark.parametrize(
    ("half", "kind"), STORAGES, ids=[f"{str(h).removeprefix('torch.')}-{k}" for h, k in STORAGES]
)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.name)
SGD = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum)
ADAM = next(row for row in ROWS if row.op == "adam_")
LAMB = next(row for row in ROWS if row.op == "lamb_" and row.rule.uses_trust_ratio)


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets their number, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- split masters --------------------------------------------------------------------------------


def there_and_back(
    values: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Halves, lows, and values again."""
    half, low = torch.empty_like(values, dtype=dtype), torch.empty_like(values, dtype=torch.int16)
    again = torch.empty_like(values)
    JIT.split_([values], [half], [low])
    JIT.join_([half], [low], [again])
    return half, low, again


@functools.cache
def failures(dtype: torch.dtype) -> Any:
    """Counts float32 words that do not come back as `preamp.kernels.stored` promises.

    They have all upper halves of a range, and given lower ones. What is kept beside half weights is
    off by ``wrong``.
    """
    zero, kinds = words.ZEROS[dtype], (formats.half_of, formats.low_of, formats.join)
    half_of, low_of, joined = cast("tuple[Any, ...]", kinds)
    f32_of, bits_of = cast("tuple[Any, ...]", (words.f32_of_bits, words.bits_of_f32))

    @compiler.kernel
    def count_bfloat16(first: Any, last: Any, lower: Any, wrong: Any) -> Any:
        bad = 0
        for upper in range(first, last):
            for i in range(len(lower)):
                word = (upper << 16) | np.int64(lower[i])
                value = f32_of(np.uint32(word))
                half = np.int64(half_of(value, zero)) & 0xFFFF
                low = np.int16(low_of(value, zero) + wrong)
                again = np.int64(bits_of(joined(half_of(value, zero), low)))
                is_nan = word & 0x7FFFFFFF > 0x7F800000
                comes_back = (again == word) & (half == (word + 0x8000) >> 16 & 0xFFFF)
                stays_nan = (half == 0x7FC0) & (low == 0)
                bad += (is_nan & (not stays_nan)) | ((not is_nan) & (not comes_back))
        return bad

    @compiler.kernel
    def count_float16(first: Any, last: Any, lower: Any, wrong: Any) -> Any:
        bad = 0
        for upper in range(first, last):
            for i in range(len(lower)):
                word = (upper << 16) | np.int64(lower[i])
                value = f32_of(np.uint32(word))
                half = np.int64(half_of(value, zero))
                low = np.int16(low_of(value, zero) + wrong)
                again = joined(half_of(value, zero), low)
                size = abs(np.float64(value))
                is_alike = np.int64(bits_of(again)) == word
                has_sign = half >> 15 == word >> 31
                is_near = abs(np.float64(value) - np.float64(again)) <= 2.0**-41
                is_infinite = (half & 0x7FFF == 0x7C00) & (low == 0)
                is_nan = (half & 0x7FFF > 0x7C00) & (low == 0)
                good = is_nan
                if size >= 65520:
                    good = is_infinite & has_sign
                elif size >= 2.0**-14:
                    good = is_alike & has_sign
                elif size >= 0:
                    good = is_near & has_sign
                bad += not good
        return bad

    return count_bfloat16 if dtype is BF16 else count_float16


def lower_halves() -> np.ndarray[Any, Any]:
    """256 of them: edges, each bit alone and missing alone, and others."""
    alone = [1 << bit for bit in range(16)]
    edges = [0, 0x0FFF, 0x7FFF, 0x8001, 0xFFFF, *alone, *(0xFFFF ^ bit for bit in alone)]
    others: Any = torch.randint(0, 2**16, (256 - len(edges),)).tolist()
    return np.array([*edges, *others], np.uint16)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_float32_values_come_back(dtype: torch.dtype) -> None:
    """2**24 words; and the compiled conversions are the definition's."""
    lower = lower_halves()
    assert failures(dtype)(0, 2**16, lower, 0) == 0
    assert failures(dtype)(0, 2**15, lower, 16) > 2**22  # it can fail
    upper = torch.arange(-(2**15), 2**15, 5) << 16
    some = (upper[:, None] | torch.tensor(lower[:24].astype(np.int32))).to(torch.int32).view(F32)
    by_reference = split(some.flatten(), dtype)
    half, low, again = there_and_back(some.flatten(), dtype)
    assert_bits([half, low, again], [*by_reference, join(*by_reference)])


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


def test_noise_differs_by_all_that_it_is_told() -> None:
    plain = chance(4096).double()
    assert abs(plain.mean() - 32767.5) < 4 * 2**16 / math.sqrt(12 * 4096)
    for other in ({"step": 2}, {"seed": 2}, {"number": 3}, {"row": 1}, {"start": 4096}):
        found = chance(4096, **other).double()
        correlation = torch.corrcoef(torch.stack([plain, found]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(4096), other


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


def scales_of(scales: torch.Tensor, shape: Any) -> torch.Tensor:
    """The scale of each element."""
    rows = shape[0]
    wide = scales.repeat_interleave(BLOCK, 1)[:, : math.prod(shape[1:])]
    return wide.reshape(rows, *shape[1:])


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
    lowest = scales_of(scales, shape).double() * 2.0 ** (2 - BINADES[kind])
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


@pytest.mark.parametrize("kind", [*BITS8, Format.BFLOAT16])
def test_noise_rounds_right_on_average(kind: Format) -> None:
    """To four sigma, over elements and steps."""
    wide = torch.rand(64, 1024).clamp(min=0.05)
    total = torch.zeros_like(wide, dtype=torch.float64)
    steps = 16
    for step in range(steps):
        told = chance(wide.numel(), step=step)
        if kind is Format.BFLOAT16:
            found = round_by_chance(wide, told.view(wide.shape))
        else:
            found = decode(*encode(wide, kind, told), kind)
        total += found.double() - wide.double()
    below = torch.exp2(torch.frexp(wide).exponent.double() - 1)
    unit = below / 128 if kind is Format.BFLOAT16 else below.clamp(min=0.25) / 32
    sigma = unit.square().sum().sqrt() * math.sqrt(steps) / 2  # at most
    assert total.sum().abs() < 4 * sigma
    assert (total / steps).abs().max() < unit.max()


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


def test_state_as_it_is_made_is_zero() -> None:
    for kind in BITS8:
        codes, scales = torch.zeros(3, 40, dtype=kind.dtype), torch.zeros(3, 1)
        assert (decode(codes, scales, kind) == 0).all()


# -- updates --------------------------------------------------------------------------------------

ULPS = 2.0**-19
"""What p may differ by, relative to the largest: formulas differ by ulps between back ends."""


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
            assert (far > ULPS * largest).double().mean() < 2e-3


@every_back_end
@every_storage
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_updates_are_the_reference(ops: Any, row: RuleRow, half: Any, kind: str) -> None:
    case = Case.of(row, half, kind)
    ours, wanted = case.run(ops), case.run(REFERENCE)
    assert_updated_alike(ours, wanted)
    if ops is PLAIN and kind == "float32":
        return  # torch's fused kernels; see the next test
    if ops is CUT and row.rule.takes_norms:
        return  # norms of pieces, whose squares are added up in another order
    if ops is not JIT:
        assert_bits(ours.kept, wanted.kept)
    # Moments of most rules take the same operations everywhere.
    if row.op in ("adam_", "lamb_", "adagrad_", "sgd_"):
        assert_bits(ours.kept_state, wanted.kept_state)
    if row.op == "sgd_":
        assert_bits(ours.kept, wanted.kept)
    with pytest.raises(AssertionError):  # and something has happened
        assert_bits(ours.kept, case.kept)


SPLIT_ROWS = [row for row in ROWS if row.op != "lars_"]  # which has masters made for each step


@every_back_end
@pytest.mark.parametrize("half", [BF16, F16])
@pytest.mark.parametrize("row", SPLIT_ROWS, ids=lambda row: row.name)
def test_split_parameters_have_the_bits_of_float32_ones(ops: Any, row: RuleRow, half: Any) -> None:
    """One rule rounds in one way, whatever its parameters are kept as at the moment."""
    shapes = *SHAPES, (70_001,)
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
    case = Case.of(ADAM, half, kind)
    case.lists[1][0][0, 0] = torch.nan
    assert_bits(case.run(ops, found_inf=torch.ones(())).kept, case.kept)
    taken = case.run(ops, found_inf=torch.zeros(()))
    assert taken.params[0][0, 0].isnan()
    assert_bits(taken.kept, case.run(ops).kept)


@every_back_end
@every_storage
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_kept_alike(ops: Any, half: Any, kind: str, bad: float) -> None:
    case = Case.of(ADAM, half, kind)
    case.lists[1][1][0, 200] = bad
    ours, wanted = case.run(ops), case.run(REFERENCE)
    if ops is not PLAIN or kind != "float32":
        assert_bits(ours.kept_state, wanted.kept_state)
    assert [p.isfinite().tolist() for p in ours.params] == [
        p.isfinite().tolist() for p in wanted.params
    ]
    lost = ~ours.state[0][1].isfinite()
    assert int(lost.sum()) == (BLOCK if kind == "8bit" else 1)
    assert lost[0, 200]


@every_storage
@pytest.mark.parametrize("ops", [REFERENCE, JIT])
def test_norms_are_those_of_what_was_kept(ops: Any, half: Any, kind: str) -> None:
    case = Case.of(LAMB, half, kind)
    told = Update(step=3, inv_scale=torch.tensor(0.5), stored=case.stored)
    before = [tensor.clone() for tensor in case.kept]
    found = ops.lamb_norms(*case.lists, rule=LAMB.rule, update=told)
    assert_bits(case.kept, before)
    wide = [case.params, case.lists[1], *case.state]
    wanted = REFERENCE.lamb_norms(*wide, rule=LAMB.rule, update=replace(told, stored=None))
    torch.testing.assert_close(found, wanted, rtol=4e-6, atol=0)


@given(data=st.data())
@settings(max_examples=examples(100))
def test_tensors_that_lie_anyhow(data: Any) -> None:
    """Any number of threads and any layout have the bits of contiguous tensors."""
    half, kind = data.draw(st.sampled_from(STORAGES))
    shapes = data.draw(
        st.lists(
            st.sampled_from([*SHAPES, (2, 17000), (130, 129), (0, 20)]), min_size=1, max_size=4
        )
    )
    layout = data.draw(st.sampled_from(LAYOUTS))
    row = data.draw(st.sampled_from([SGD, ADAM]))
    case = Case.of(row, half, kind, shapes=shapes, layout=layout)
    in_order = Case.of(row, half, kind, shapes=shapes)
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 4)))
    try:
        ours = case.run(JIT)
    finally:
        torch.set_num_threads(before)
    wanted = in_order.run(JIT)
    if row is SGD or layout in LAYOUTS[::2][:2]:
        assert_bits(ours.kept, wanted.kept)
    else:  # some by the reference
        assert_updated_alike(ours, wanted)
        assert_bits(ours.kept_state, wanted.kept_state)


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_any_number_of_threads_has_the_same_bits(threads: Any, kind: str) -> None:
    case = Case.of(ADAM, BF16, kind, shapes=((300, 700), (3, 100_000), (7, 20)))
    threads(1)
    wanted = case.run(JIT)
    for count in (2, 3, 8):
        threads(count)
        assert_bits(case.run(JIT).kept, wanted.kept)


@pytest.mark.parametrize("ops", [REFERENCE, JIT], ids=["reference", "jit"])
@every_storage
def test_rows_by_themselves_have_the_bits_of_the_whole(ops: Any, half: Any, kind: str) -> None:
    """As the ranks of a sharded model have them."""
    case = Case.of(ADAM, half, kind)
    whole = case.run(ops)
    for place in ((0, 3), (3, 4), (4, None)):
        slices = [slice(*place)] * len(SHAPES)
        assert_bits(case.part(slices).run(ops).kept, whole.part(slices).kept)


@every_storage
@one_each
def test_versions_rise_for_what_is_written(row: RuleRow, half: Any, kind: str) -> None:
    case = Case.of(row, half, kind)
    count = len(case.lists[0])
    written = case.kept
    if row.rule.leaves_state:
        written = [*case.lists[0], *(case.stored.lows or [])]
    elif row.rule.has_numbers:
        written = [tensor for tensor in written if tensor.dim()]
    before = [tensor._version for tensor in written]
    told = Update(step=2, stored=case.stored)
    JIT.update_(*case.lists, rule=row.rule, update=told)
    assert all(t._version > was for t, was in zip(written, before, strict=True))
    assert [tensor._version for tensor in case.lists[1]] == [0] * count


@pytest.mark.parametrize("kind", ["float32", "8bit"])
def test_some_places_by_the_reference(kind: str) -> None:
    """What no kernel can walk goes there with its own lows, scales, numbers and starts."""
    case = Case.of(SGD, BF16, kind)
    wanted = case.run(REFERENCE)
    for row in (0, 1, 2):
        case.lists[row][1] = spaced(case.lists[row][1])
    assert_bits(case.run(JIT).kept, wanted.kept)
    if kind == "8bit":
        scales = [*case.stored.scales[0]]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
        scales[2] = spaced(scales[2])
        case.stored = replace(case.stored, scales=(scales,))
        assert_bits(case.run(JIT).kept, wanted.kept)


def test_gradients_of_any_dtype() -> None:
    for half in (BF16, F16):
        for grads in (BF16, F16, F32):
            case = Case.of(SGD, half, "8bit")
            case.lists[1] = [tensor.to(grads) for tensor in case.lists[1]]
            assert_bits(case.run(JIT).kept, case.run(REFERENCE).kept)


def test_momentum_that_is_not_used_is_left_alone() -> None:
    row = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum == 0)
    case = Case.of(row, BF16, "8bit")
    for ops in (REFERENCE, JIT):
        assert_bits(case.run(ops).kept_state, case.kept_state)


# -- what does not fit ----------------------------------------------------------------------------


def _bad() -> dict[str, tuple[Case, dict[str, Any]]]:
    def case(half: Any = BF16, kind: str = "8bit", **changes: Any) -> Case:
        made = Case.of(ADAM, half, kind)
        return replace(made, stored=replace(made.stored, **changes))

    good = case()
    lows, (signed, unsigned) = list(good.stored.lows or []), good.stored.scales
    wide = case(half=None)
    wide.lists[0] = [tensor.double() for tensor in wide.lists[0]]
    floats = case(kind="8bit")
    floats.lists[2] = [tensor.float() for tensor in floats.lists[2]]
    transposed = [tensor.transpose(0, 1) for tensor in lows]
    assert signed is not None
    return {
        "halves": (good, {"halves": [tensor.clone() for tensor in good.lists[0]]}),
        "float64": (wide, {}),
        "lows of float32 weights": (case(half=None, lows=lows), {}),
        "fewer lows": (case(lows=lows[1:]), {}),
        "lows of other shapes": (case(lows=transposed), {}),
        "lows of another dtype": (case(lows=[tensor.int() for tensor in lows]), {}),
        "codes of another dtype": (floats, {}),
        "fewer formats": (case(formats=(Format.SIGNED,)), {}),
        "no scales": (case(scales=()), {}),
        "fewer scales": (case(scales=(signed[1:], unsigned)), {}),
        "scales of other shapes": (case(scales=([t[1:] for t in signed], unsigned)), {}),
        "scales of another dtype": (case(scales=([t.double() for t in signed], unsigned)), {}),
        "fewer numbers": (case(numbers=[1]), {}),
        "no starts": (case(starts=()), {}),
    }


@pytest.mark.parametrize("ops", [REFERENCE, JIT])
@pytest.mark.parametrize("name", _bad())
def test_what_does_not_fit_is_refused(ops: Any, name: str) -> None:
    case, told = _bad()[name]
    before = [tensor.clone() for tensor in case.kept]
    update = Update(step=1, stored=case.stored, **told)
    with pytest.raises(ValueError, match=r"(?s)got|Lists|shape.*\..*\."):
        ops.update_(*case.lists, rule=ADAM.rule, update=update)
    assert_bits(case.kept, before)


def test_numbers_have_no_blocks() -> None:
    scalar = [torch.zeros((), dtype=torch.int8)]
    stored = Stored(
        formats=(Format.SIGNED,), scales=([torch.zeros(1, 1)],), numbers=[0], starts=[0]
    )
    rule = SgdRule(lr=0.1, weight_decay=0.0, momentum=0.9, dampening=0.0, nesterov=False)
    update = Update(stored=stored)
    zeros = [torch.zeros(())]
    with refused("kernels", "blocks of a number"):
        check_stored(zeros, [scalar], update)
    for ops in (REFERENCE, JIT):
        with refused("kernels", "blocks of a number"):
            ops.update_(zeros, zeros, scalar, rule=rule, update=update)
