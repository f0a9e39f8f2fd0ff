# SPDX-License-Identifier: BSD-3-Clause
"""Lists that are kept in fewer bits, in Triton's kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.back_ends import REFERENCE
from cases.layouts import channels_last, transposed, unaligned
from cases.rules import BF16, F16, ONE_EACH, ROWS, RuleRow
from cases.stored import STORAGES, Case, assert_bits, on, spaced
from preamp.kernels import Update

SHAPES = ((17, 100), (2, 300), (9, 128), (2, 3, 3, 3), (0, 20))
ADAM = next(row for row in ROWS if row.op == "adam_")
SGD = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum)
LAMB = next(row for row in ROWS if row.op == "lamb_" and row.rule.uses_trust_ratio)

every_storage = pytest.mark.parametrize(
    ("half", "kind"), STORAGES, ids=[f"{str(h).removeprefix('torch.')}-{k}" for h, k in STORAGES]
)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)


def made(device: torch.device, *given: Any, **told: Any) -> Case:
    return on(device, Case.of(*given, **{"shapes": SHAPES, **told}))


def exact(row: RuleRow) -> bool:
    """Whether sums have no order of their own, so that every bit is the reference's."""
    return row.op in {"adagrad_", "sgd_"}


def assert_alike(ours: Case, wanted: Case) -> None:
    """Parameters to a few units; codes and halves to the next one where a value is near it."""
    for one, other in zip(ours.params, wanted.params, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7, equal_nan=True)
    for one, other in zip(ours.kept_state, wanted.kept_state, strict=True):
        if one.dtype in (torch.int8, torch.uint8):
            far = (one.int() - other.int()).abs()
            assert far.numel() == 0 or far.max() <= 1
            assert (far > 0).sum() <= 2 + one.numel() // 500
        else:
            rtol = 2.0**-7 if one.dtype is BF16 else 2e-6
            torch.testing.assert_close(one, other, rtol=rtol, atol=1e-8)


@every_storage
@one_each
def test_updates_of_every_rule(
    ops: Any, device: torch.device, row: RuleRow, half: Any, kind: str
) -> None:
    case = made(device, row, half, kind)
    factor = torch.tensor(0.5, device=device)
    ours, wanted = case.run(ops, inv_scale=factor), case.run(REFERENCE, inv_scale=factor)
    assert_alike(ours, wanted)
    if exact(row):
        assert_bits(ours.kept_state, wanted.kept_state)
    with pytest.raises(AssertionError):
        assert_bits(ours.kept, case.kept)


@pytest.mark.parametrize("half", [BF16, F16])
def test_what_is_split_comes_back(ops: Any, device: torch.device, half: Any) -> None:
    """Without a gradient nothing moves, whatever the words: the bits are the reference's."""
    case = made(device, SGD, half, "float32", shapes=[(3, 1500)])
    words = torch.randint(-(2**31), 2**31, (1500,), generator=torch.Generator().manual_seed(1))
    kinds: Any = {0: words.int().view(half)[: 2 * 1500 : 2]}
    lists, lows = case.lists, case.stored.lows
    assert lows is not None
    lists[0][0][0] = kinds[0].to(device)
    lows[0][0] = words.int().view(torch.int16)[::2].to(device)
    lows[0][1] = -(2**15)
    lists[0][0][1, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan], dtype=half)
    if half is F16:  # half way between two, and below the normal range
        lists[0][0][2] = (torch.arange(1500) * 2.0**-24).to(half)
        lows[0][2, ::2] = 2**15 - 1
        lows[0][2, 1::2] = -(2**15)
    lists[1][0].zero_()
    lists[2][0].zero_()
    factor = torch.tensor(0.5, device=device)
    ours, wanted = case.run(ops, inv_scale=factor), case.run(REFERENCE, inv_scale=factor)
    assert_bits(ours.kept, wanted.kept)


def test_moments_that_are_odd(ops: Any, device: torch.device) -> None:
    """Infinite, nan, negative zero, below the normal range, and near the end of the range."""
    values = [torch.inf, -torch.inf, torch.nan, 1e-41, -1e-38, 3.39e38, -3.4e38, -0.0, 1e-30]
    for kind in ("bfloat16", "8bit"):
        case = made(device, SGD, None, kind, shapes=[(len(values), 300)])
        case.lists[0][0].zero_()
        case.lists[1][0] = torch.zeros(len(values), 300, device=device)
        case.lists[1][0][:, 7] = torch.tensor(values)
        case.lists[1][0][:, 130:] = torch.tensor(values)[:, None] * 0.37
        factor = torch.ones((), device=device)
        for step in (1, 2):
            told: Any = {"inv_scale": factor, "step": step}
            ours, wanted = case.run(ops, **told), case.run(REFERENCE, **told)
            assert_bits(ours.kept_state, wanted.kept_state)
            case = replace(ours, lists=[ours.lists[0], case.lists[1], *ours.lists[2:]])


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_chance_goes_by_the_whole_tensor(ops: Any, device: torch.device, kind: str) -> None:
    """By its step, on the device too, and by where a part starts, far and at any element."""
    case = made(device, SGD, BF16, kind)
    for start in (5, 2**35 + 8):
        starts = [start + 16 * i for i in range(len(SHAPES))]
        moved = replace(case, stored=replace(case.stored, starts=starts, seed=2**32 - 1))
        moved.stored = replace(moved.stored, numbers=[2**31 - 1 - i for i in range(len(SHAPES))])
        told: Any = {"inv_scale": torch.tensor(0.5, device=device)}
        wanted = moved.run(REFERENCE, step=7, **told)
        for step in (7, torch.tensor(7, device=device)):
            assert_bits(moved.run(ops, step=step, **told).kept, wanted.kept)
        with pytest.raises(AssertionError):
            assert_bits(moved.run(ops, step=8, **told).kept, wanted.kept)


@every_storage
def test_a_skipped_step_keeps_every_bit(
    ops: Any, device: torch.device, half: Any, kind: str
) -> None:
    case = made(device, ADAM, half, kind, shapes=SHAPES[:2])
    case.lists[1][0][0, 0] = torch.nan
    told: Any = {"inv_scale": torch.tensor(0.5, device=device)}
    skipped = case.run(ops, found_inf=torch.ones((), device=device), **told)
    assert_bits(skipped.kept, case.kept)
    taken = case.run(ops, found_inf=torch.zeros((), device=device), **told)
    assert taken.params[0][0, 0].isnan()


def test_one_launch(ops: Any, device: torch.device, launches: Any) -> None:
    case = made(device, ADAM, BF16, "8bit")
    with launches() as names:
        case.run(ops, inv_scale=torch.tensor(0.5, device=device))
    assert names == ["update_kernel"]


@pytest.mark.parametrize("layout", [spaced, unaligned, transposed, channels_last])
@pytest.mark.parametrize("kind", ["float32", "8bit"])
def test_tensors_that_lie_anyhow(ops: Any, device: torch.device, layout: Any, kind: str) -> None:
    """What kernels cannot walk is updated by the reference."""
    shapes = [(8, 128), (3, 3, 3, 3)]
    case = made(device, SGD, BF16, kind, shapes=shapes, layout=layout)
    told: Any = {"inv_scale": torch.tensor(0.5, device=device)}
    assert_bits(case.run(ops, **told).kept, case.run(REFERENCE, **told).kept)


@pytest.mark.parametrize("half", [None, BF16])
def test_norms_are_those_of_what_was_kept(ops: Any, device: torch.device, half: Any) -> None:
    case = made(device, LAMB, half, "8bit")
    factor = torch.tensor(0.5, device=device)
    told = Update(step=3, inv_scale=factor, stored=case.stored)
    before = [tensor.clone() for tensor in case.kept]
    found = ops.lamb_norms(*case.lists, rule=LAMB.rule, update=told)
    wanted = REFERENCE.lamb_norms(*case.lists, rule=LAMB.rule, update=told)
    assert_bits(case.kept, before)
    torch.testing.assert_close(found, wanted, rtol=4e-6, atol=0)
