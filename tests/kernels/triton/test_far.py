# SPDX-License-Identifier: BSD-3-Clause
"""Elements behind the first 2**31 of a tensor, without the memory for those before them.

Tables are changed on their way to the kernels: every tensor seems to have so many elements more,
which no program works on, and to begin so far before its memory. Results must be the same.
"""

import math
from typing import Any

import pytest
import torch

from cases.rules import BF16, F16, ONE_EACH, ROWS, RuleRow
from cases.stored import STORAGES, Case, assert_bits, on
from preamp.kernels.plans import GRADS
from preamp.kernels.stored import BLOCK as SLOTS

CHUNK = 8192
FAR = 3 * 2**31
"""Elements, or slots, before the first one."""

SHAPES = ((48, 200), (9, 1024))
"""Rows of two blocks with a gap, and of whole ones; both divide chunks."""

BY_TENSOR = {"gather_kernel", "average_norms"}
"""Kernels that take partial results of whole tensors."""

ADAM = next(row for row in ROWS if row.op == "adam_")


def far_from(table: Any, rows: Any, behind: int, sizes: Any) -> tuple[Any, Any]:
    """Pointers and layout of a table as if ``FAR`` elements were before those it has."""
    count = table.count
    layout, pointers = table.layout.clone(), table.pointers.clone().view(-1, count)
    layout[:count] += FAR
    layout[count : 2 * count] -= FAR // CHUNK
    in_slots = behind > 1 and sizes is not None
    for place, tensor in enumerate(rows[0]):
        elements = FAR
        if in_slots:
            row = math.prod(tensor.shape[1:])
            slots = -(-row // SLOTS) * SLOTS
            assert CHUNK % slots == 0
            elements = FAR // slots * row
        for number, others in enumerate(rows):
            if others[place].shape == tensor.shape:  # else a number of each tensor
                pointers[number, place] -= elements * others[place].itemsize
        if behind > 1:  # behind them are scales of both lists, and where the tensors begin
            for number in (0, 1):
                pointers[len(rows) + number, place] -= FAR // SLOTS * 4
            pointers[len(rows) + 3, place] -= elements
    return pointers.view(-1), layout


@pytest.fixture
def far(ops: Any, part: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Put all that kernels work on far away; returns the names of those that were started."""
    tables, launch = part("tables").table, part("launch").launch
    twins: dict[int, tuple[Any, Any]] = {}
    started: set[str] = set()
    lay = part("works").Launch._lay_tables

    def far_table(plan: Any, at: Any = None, sizes: Any = None, **options: Any) -> Any:
        table = tables(plan, at, sizes, **options)
        rows = [row for n, row in enumerate(plan.rows) if row and not (options and n == GRADS)]
        if at is not None and len(at) > len(rows) + 1:  # scales, if there are any, are behind
            rows = rows[: len(at) - 5]
        behind = 0 if at is None else len(at) - len(rows)
        pointers, layout = far_from(table, rows, behind, sizes)
        twins[id(table.pointers)], twins[id(table.layout)] = (table, pointers), (table, layout)
        return table

    def lay_far_tables(work: Any) -> None:
        lay(work)
        far = work.grads.clone()
        for place, grad in enumerate(work.rows("G")):
            row = math.prod(grad.shape[1:])
            elements = FAR // (-(-row // SLOTS) * SLOTS) * row if work.in_blocks else FAR
            far[place] -= elements * grad.itemsize
        work.grads = far

    def far_launch(function: Any, grid: Any, table: Any, **arguments: Any) -> None:
        name = function.fn.__name__
        started.add(name)
        if name not in BY_TENSOR:
            pointers = twins.get(id(table.pointers), (None, table.pointers))[1]
            layout = twins[id(table.layout)][1]
            table = part("tables").Table(pointers, layout, table.count, table.chunks)
        launch(function, grid, table, **arguments)

    for name in ("works", "ops"):
        monkeypatch.setattr(part(name), "table", far_table)
    for name in ("works", "reductions", "ops"):
        monkeypatch.setattr(part(name), "launch", far_launch)
    monkeypatch.setattr(part("launch"), "launch", far_launch)
    monkeypatch.setattr(part("works").Launch, "_lay_tables", lay_far_tables)
    return started


@pytest.mark.parametrize(
    ("half", "kind"),
    [pytest.param(*row, marks=[pytest.mark.full] if row[0] is F16 else []) for row in STORAGES],
)
def test_updates_in_fewer_bits(
    ops: Any, device: torch.device, half: Any, kind: str, request: pytest.FixtureRequest
) -> None:
    case = on(device, Case.of(ADAM, half, kind, shapes=SHAPES))
    wanted = case.run(ops)
    request.getfixturevalue("far")
    assert_bits(case.run(ops).kept, wanted.kept)


@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)
def test_updates_of_every_rule(
    ops: Any, device: torch.device, row: RuleRow, request: pytest.FixtureRequest
) -> None:
    case = on(device, Case.of(row, BF16, "float32", shapes=SHAPES))
    wanted = case.run(ops)
    started = request.getfixturevalue("far")
    assert_bits(case.run(ops).kept, wanted.kept)
    assert "update_kernel" in started


def test_all_other_ops(ops: Any, device: torch.device, request: pytest.FixtureRequest) -> None:
    wanted = results(ops, device)
    started = request.getfixturevalue("far")
    for name, tensors in results(ops, device).items():
        for ours, other in zip(tensors, wanted[name], strict=True):
            assert torch.equal(ours, other), name
    assert started == {"measure_chunks", "gather_kernel", "combine_kernel", "convert_kernel"}


def results(ops: Any, device: torch.device) -> dict[str, list[torch.Tensor]]:
    """What every op that is no update returns or writes."""
    random = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=random).to(device) for shape in SHAPES]
    half = [tensor.to(F16) for tensor in wide]
    one, two = torch.ones((), device=device), torch.full((), 2.0, device=device)
    census = ops.census(half, device, with_norm=True)
    kept = {
        "census": [census.found_inf, census.norm, census.max_abs],
        "norms": [ops.l2norms(half, two, device)],
        "widened": ops.widen_add(half, [one, two], [None, None]),
    }
    for name, dtype in (("split", F16), ("split bfloat16", BF16)):
        halves = [torch.empty_like(tensor, dtype=dtype) for tensor in wide]
        lows = [torch.empty_like(tensor, dtype=torch.int16) for tensor in wide]
        joined = [torch.empty_like(tensor) for tensor in wide]
        ops.split_(wide, halves, lows)
        ops.join_(halves, lows, joined)
        kept[name] = [*halves, *lows, *joined]
    sums = [torch.zeros_like(tensor) for tensor in wide]
    ops.axpby_(sums, two, wide, 0.5, half)
    return kept | {"sums": sums}
