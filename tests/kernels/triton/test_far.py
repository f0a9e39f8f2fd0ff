# SPDX-License-Identifier: BSD-3-Clause
"""Elements behind the first 2**31 of a tensor, without the memory for those before them.

Tables are changed on their way to the kernel of updates: every tensor seems to have so many
elements more, which no program works on, and to begin so far before its memory. Results must be the
same. What other kernels make of addresses is read from their code in `test_compiled`.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.rules import F16, ONE_EACH
from cases.stored import STORAGES, Case, assert_bits, on
from preamp.kernels.plans import GRADS
from preamp.kernels.stored import BLOCK as SLOTS

CHUNK = 8192
FAR = 3 * 2**31
"""Elements, or slots, before the first one."""

SHAPES = ((48, 200), (9, 1024))
"""Rows of two blocks with a gap, and of whole ones; both divide chunks."""


def elements_before(tensor: torch.Tensor, in_slots: bool) -> int:
    row = math.prod(tensor.shape[1:])
    slots = -(-row // SLOTS) * SLOTS
    assert CHUNK % slots == 0
    return FAR // slots * row if in_slots else FAR


def make_far(part: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put all that updates work on far away; returns the names of kernels that are started."""
    works, started, changed = part("works"), list[str](), dict[int, Any]()
    tables, launch, lay = works.table, works.launch, works.Launch._lay_tables

    def far_table(plan: Any, at: Any = None, sizes: Any = None, **options: Any) -> Any:
        table = tables(plan, at, sizes, **options)
        rows = [row for n, row in enumerate(plan.rows) if row and not (options and n == GRADS)]
        if at is not None and len(at) > len(rows) + 1:  # scales, if there are any, are behind
            rows = rows[: len(at) - 5]
        behind = 0 if at is None else len(at) - len(rows)
        count = table.count
        layout, pointers = table.layout.clone(), table.pointers.clone().view(-1, count)
        layout[:count] += FAR
        layout[count : 2 * count] -= FAR // CHUNK
        for place, tensor in enumerate(rows[0]):
            elements = elements_before(tensor, behind > 1 and sizes is not None)
            for number, others in enumerate(rows):
                if others[place].shape == tensor.shape:  # else a number of each tensor
                    pointers[number, place] -= elements * others[place].itemsize
            if behind > 1:  # behind them are scales of both lists, and where the tensors begin
                pointers[len(rows) : len(rows) + 2, place] -= FAR // SLOTS * 4
                pointers[len(rows) + 3, place] -= elements
        pairs = (table.pointers, pointers.view(-1)), (table.layout, layout)
        changed.update({id(near): (near, far) for near, far in pairs})
        return table

    def lay_far_tables(work: Any) -> None:
        lay(work)
        far = work.grads.clone()
        for place, grad in enumerate(work.rows("G")):
            far[place] -= elements_before(grad, work.in_blocks) * grad.itemsize
        work.grads = far

    def far_launch(function: Any, grid: Any, table: Any, **arguments: Any) -> None:
        started.append(function.fn.__name__)
        found = [changed[id(one)][1] for one in (table.pointers, table.layout)]
        launch(function, grid, replace(table, pointers=found[0], layout=found[1]), **arguments)

    monkeypatch.setattr(works, "table", far_table)
    monkeypatch.setattr(works, "launch", far_launch)
    monkeypatch.setattr(works.Launch, "_lay_tables", lay_far_tables)
    return started


@pytest.mark.parametrize(
    ("half", "kind"),
    [pytest.param(*row, marks=[pytest.mark.full] if row[0] is F16 else []) for row in STORAGES],
)
@pytest.mark.parametrize("row", [ONE_EACH[0]], ids=lambda row: row.op)
def test_updates(
    ops: Any, part: Any, device: torch.device, row: Any, half: Any, kind: str, monkeypatch: Any
) -> None:
    case = on(device, Case.of(row, half, kind, shapes=SHAPES))
    wanted = case.run(ops)
    started = make_far(part, monkeypatch)
    assert_bits(case.run(ops).kept, wanted.kept)
    assert started == ["update_kernel"]
