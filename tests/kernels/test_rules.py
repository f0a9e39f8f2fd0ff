# SPDX-License-Identifier: BSD-3-Clause
"""Update rules against the reference, and against it in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.rules import BF16, F16, F32, F64, FUSED, ONE_EACH, ROWS, SIGNATURES, RuleRow
from cases.tolerances import assert_same, assert_within_budget
from preamp.kernels import Update, backend

REFERENCE = backend("reference")
SIZES = (0, 1, 13, 1031)
EDGES = (1024, 8191, 8192, 8193)
ULPS = 4
ULPS_WITH_NORMS = 16
"""A sum of thousands of squares depends on its order; each back end has its own."""

READ_ON_DEVICE = (*ONE_EACH, ROWS[0], ROWS[13])
"""Each op, and each way to use a bias correction."""

Lists = list[list[torch.Tensor]]

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)
every_signature = pytest.mark.parametrize(
    "dtypes", SIGNATURES, ids=lambda s: "-".join(str(d).removeprefix("torch.") for d in s)
)


def draw(seed: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Values in every kind of layout: flat, channels_last, transposed, unaligned."""
    generator = torch.Generator().manual_seed(seed)
    flat = [torch.randn(size, generator=generator) for size in SIZES]
    image = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    found = [value.to(device, dtype) for value in (*flat, image, image.clone().transpose(1, 3))]
    unaligned = torch.randn(1030, generator=generator).to(device, dtype)[3:]
    return [*found, unaligned]


def state_of(row: RuleRow, dtype: torch.dtype, device: torch.device) -> Lists:
    """State as after some steps; norms also as before the first step, and zero."""
    lists = [draw(20 + index, dtype, device) for index in range(row.states)]
    lists[-1] = [value.abs() for value in lists[-1]]
    if row.op == "novograd_":
        lists[-1] = [
            torch.tensor((0.5 + index, -1.0, 0.0)[index % 3], dtype=dtype, device=device)
            for index in range(len(lists[0]))
        ]
    return lists


def copy(lists: Sequence[Sequence[torch.Tensor]]) -> Lists:
    return [[tensor.clone() for tensor in row] for row in lists]


def run(ops: Any, row: RuleRow, lists: Lists, rule: Any = None, **update: Any) -> Lists:
    """Update copies of ``lists``; returns them."""
    lists = copy(lists)
    ops.update_(*lists, rule=rule or row.rule, update=Update(**update))
    return lists


def assert_close(row: RuleRow, ours: Lists, wanted: Lists, before: Lists) -> None:
    """Within the ulps that the op table states, of the largest term of the stored sum."""
    allowed = ULPS_WITH_NORMS if row.rule.takes_norms else ULPS
    for number, rows in enumerate(zip(ours, wanted, before, strict=True)):
        for index, (a, b, old) in enumerate(zip(*rows, strict=True)):
            assert a.dtype is b.dtype
            info = torch.finfo(a.dtype)
            wide = torch.stack([t.double() for t in (b, old, b - old)])
            size = wide.abs().amax(dim=0).clamp(min=info.tiny)
            error = (a.double() - b.double()).abs() / (size * info.eps)
            assert not error.isnan().any()
            assert (error <= allowed).all(), f"list {number}, tensor {index}: {error.max()} ulps"


@every_signature
@every_row
def test_rules_agree_with_the_reference(
    ops: Any, device: torch.device, row: RuleRow, dtypes: tuple[Any, ...]
) -> None:
    p, g, s, h = dtypes
    before = [draw(1, p, device), draw(2, g, device), *state_of(row, s, device)]
    halves = None if h is None else draw(3, h, device)
    update: dict[str, Any] = {"step": 3, "inv_scale": torch.tensor(0.25, device=device)}
    ours = run(ops, row, before, **update, halves=halves)
    wanted = run(REFERENCE, row, before, **update)
    assert_close(row, ours, wanted, before)
    for one, other in zip(ours[1], before[1], strict=True):
        assert_same(one, other, "gradients are read only")
    for param, half in zip(ours[0], halves or (), strict=False):
        assert_same(half, param.to(half.dtype), "a half is its rounded parameter")


@one_each
def test_the_edges_of_blocks_and_chunks(ops: Any, device: torch.device, row: RuleRow) -> None:
    generator = torch.Generator().manual_seed(4)
    before = [
        [torch.rand(size, generator=generator).to(device, dtype) for size in EDGES]
        for dtype in (F32, BF16, *[F32] * row.states)
    ]
    if row.op == "novograd_":
        before[-1] = [torch.ones((), device=device) for _ in EDGES]
    ours, wanted = (run(back_end, row, before, step=2) for back_end in (ops, REFERENCE))
    assert_close(row, ours, wanted, before)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("row", READ_ON_DEVICE, ids=lambda row: row.name)
def test_what_is_read_on_the_device(
    ops: Any, device: torch.device, row: RuleRow, dtype: torch.dtype
) -> None:
    """Steps, rates and scales as tensors, against float64."""
    before = [draw(1, dtype, device), draw(2, dtype, device), *state_of(row, dtype, device)]
    rule = replace(row.rule, lr=torch.tensor(0.125, dtype=F64, device=device))
    for step in (1, 5000):
        update = {
            "step": torch.tensor(step, device=device),
            "inv_scale": torch.tensor(0.25, device=device),
            "found_inf": torch.zeros((), device=device),
        }
        ours = run(ops, row, before, rule, **update)
        low = run(REFERENCE, row, before, rule, **update)
        wide = [[tensor.double() for tensor in each] for each in before]
        exact = run(REFERENCE, row, wide, rule, **update)
        for rows in zip(ours, low, exact, strict=True):
            for one, other, oracle in zip(*rows, strict=True):
                if one.numel():
                    assert_within_budget(one, other, oracle)


def test_corrections_keep_their_digits(ops: Any, device: torch.device) -> None:
    row = FUSED[0]
    rule = replace(row.rule, beta1=0.0, beta2=0.999, eps=0.0, weight_decay=0.0)
    for dtype, digits in ((F32, 2.0**-21), (F64, 2.0**-46)):
        for step in (1, 2, 100, 692, 694, 10000):
            ones = [[torch.ones(1, dtype=dtype, device=device)] for _ in range(4)]
            ones[3][0].zero_()
            update = Update(step=torch.tensor(step, device=device))
            ops.update_(*ones, rule=rule, update=update)
            root = math.sqrt((1 - 0.999) / -math.expm1(step * math.log(0.999)))
            wanted = 1 - 0.1 / root
            assert ones[0][0].item() == pytest.approx(wanted, abs=digits * 0.1 / root)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
@one_each
def test_found_inf_keeps_every_bit(
    ops: Any, device: torch.device, row: RuleRow, bad: float
) -> None:
    lists = [draw(1, F32, device), draw(2, BF16, device), *state_of(row, BF16, device)]
    lists[1][3][7] = bad
    halves = draw(3, F16, device)
    for number, each in enumerate(lists[:1] + lists[2:] + [halves]):
        each[3].view(-1)[0] = math.nan if number % 2 else -0.0
    before = copy([*lists, halves])
    flag = torch.tensor(2.0, device=device)  # two ranks that both found one, summed
    update = Update(step=2, found_inf=flag, halves=halves)
    ops.update_(*lists, rule=row.rule, update=update)
    for each, old in zip([*lists, halves], before, strict=True):
        for tensor, was in zip(each, old, strict=True):
            bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            assert torch.equal(tensor.contiguous().view(bits), was.contiguous().view(bits))


@one_each
def test_a_bad_gradient_spoils_its_own_tensors_only(
    ops: Any, device: torch.device, row: RuleRow
) -> None:
    lists = [draw(1, F32, device), draw(2, F32, device), *state_of(row, F32, device)]
    lists[1][3][1030] = math.nan
    ours, wanted = (run(back_end, row, lists, step=3) for back_end in (ops, REFERENCE))
    for one, other in zip(ours[0], wanted[0], strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert not ours[0][3].isfinite().all()
    assert all(tensor.isfinite().all() for i, tensor in enumerate(ours[0]) if i != 3)


@one_each
def test_places_that_no_kernel_takes(ops: Any, device: torch.device, row: RuleRow) -> None:
    """Strided parameters and gradients in another layout go to the reference."""
    lists = [draw(1, F32, device), draw(2, F32, device), *state_of(row, F32, device)]
    lists[0][1] = torch.ones(2, device=device)[::2]
    lists[0][2] = torch.ones(26, device=device)[::2]
    lists[1][4] = lists[1][4].contiguous()
    halves: list[Any] = [None, *draw(3, F16, device)[1:]]
    before = copy(lists)
    wanted = run(REFERENCE, row, lists, step=2)
    ops.update_(*lists, rule=row.rule, update=Update(step=2, halves=halves))
    assert_close(row, lists, wanted, before)
    for param, half in zip(lists[0][1:], halves[1:], strict=True):
        assert_same(half, param.to(F16))


@one_each
def test_writes_are_noticed_by_autograd(ops: Any, device: torch.device, row: RuleRow) -> None:
    lists = [draw(1, F32, device), draw(2, F32, device), *state_of(row, F32, device)]
    lists[0] = [param.clone().requires_grad_() for param in lists[0]]
    (lists[0][3] * lists[0][3]).sum().backward()
    loss = (lists[0][3] * lists[0][3]).sum()
    versions = [[tensor._version for tensor in each] for each in lists]
    ops.update_(*lists, rule=row.rule, update=Update())
    later = [[tensor._version for tensor in each] for each in lists]
    assert later[1] == versions[1]
    changes = zip(lists[0], later[0], versions[0], strict=True)
    assert all(new > old for param, new, old in changes if param.numel())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@one_each
def test_no_tensors_at_all(ops: Any, row: RuleRow) -> None:
    ops.update_(*[[] for _ in range(2 + row.states)], rule=row.rule, update=Update())


@one_each
def test_empty_tensors(ops: Any, device: torch.device, row: RuleRow) -> None:
    lists = [[torch.zeros(0, device=device)] for _ in range(2 + row.states)]
    if row.op == "novograd_":
        lists[-1] = [torch.full((), 0.5, device=device)]
    ours, wanted = (run(back_end, row, lists, step=2) for back_end in (ops, REFERENCE))
    assert_close(row, ours[2:], wanted[2:], lists[2:])


@one_each
def test_lists_of_unequal_length_are_refused(ops: Any, device: torch.device, row: RuleRow) -> None:
    ones = torch.ones(2, device=device)
    lists = [[ones.clone(), ones.clone()] for _ in range(2 + row.states)]
    lists[1].pop()
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter|^Lists of 2, 1, "):
        ops.update_(*lists, rule=row.rule, update=Update())
    assert torch.equal(lists[0][0], ones)
