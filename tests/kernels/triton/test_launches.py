# SPDX-License-Identifier: BSD-3-Clause
"""How many kernels an op launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.rules import F16, F32, ONE_EACH, RuleRow
from preamp.kernels import Update

one_each = pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)


@one_each
def test_launches_of_rules_do_not_grow_with_the_tensors(
    ops: Any, device: torch.device, row: RuleRow, launches: Any
) -> None:
    counts = []
    for tensors in (1, 50):
        shapes = [(3,)] * (2 + row.states)
        lists = [[torch.ones(s, device=device) for _ in range(tensors)] for s in shapes]
        if row.op == "novograd_":
            lists[-1] = [torch.ones((), device=device) for _ in range(tensors)]
        with launches() as names:
            ops.update_(*lists, rule=row.rule, update=Update())
        counts.append(list(names))
        assert len({tuple(tensor.tolist()) for tensor in lists[0]}) == 1
    assert counts[0] == counts[1]
    assert names.count("update_kernel") == (2 if row.op == "lamb_" else 1)


def test_launches_do_not_grow_with_the_tensors(
    ops: Any, device: torch.device, launches: Any
) -> None:
    """One per dtype signature; a census has a second, over tensors, for what chunks found."""
    grads = [torch.ones(3, dtype=dtype, device=device) for dtype in (F16, F32) for _ in range(60)]
    with launches() as names:
        ops.census(grads, device)
    assert names == ["measure_chunks", "gather_kernel"] * 2
    with launches() as names:
        ops.scale_add_(grads, 0.5, [None] * 120)
    assert names == ["combine_kernel"] * 2
    with launches() as names:
        ops.widen_add(grads[:60], [torch.ones((), device=device)] * 60, [None] * 60)
    assert names == ["combine_kernel"]
