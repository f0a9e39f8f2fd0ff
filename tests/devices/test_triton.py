# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels on a GPU: nothing there may wait for the device."""

import importlib
import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cases.rules import ONE_EACH, RuleRow
from cases.waits import waits_refused
from preamp.kernels import Update

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed"),
]


@pytest.fixture
def ops() -> Any:
    return importlib.import_module("preamp.kernels.triton").Triton()


def ones(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype, device="cuda") for size in (1, 4099, 20000)]


def use_every_op(ops: Any, one: torch.Tensor) -> None:
    """Gradients and their tables are new in every call."""
    grads = ones(torch.float16)
    ops.census([*grads, *ones()], one.device, with_norm=True)
    ops.scale_add_(grads, one, [None] * 3)
    ops.scale_add_(grads, 0.5, ones(torch.float16))
    ops.widen_add(grads, [one] * 3, [None] * 3)
    ops.cast_copy_(ones(), grads)
    ops.axpby_(grads, one, ones(), 2.0, ones(torch.bfloat16))
    ops.l2norm(grads, [one, None, one], one.device)
    ops.l2norms(grads, one, one.device)


def test_no_op_waits(ops: Any) -> None:
    one = torch.ones((), device="cuda")
    use_every_op(ops, one)
    with waits_refused():
        use_every_op(ops, one)


@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.op)
def test_no_rule_waits(ops: Any, row: RuleRow) -> None:
    one = torch.ones((), device="cuda")
    updates = (
        Update(step=3),
        Update(step=one.long(), inv_scale=one, found_inf=one * 0, halves=ones(torch.bfloat16)),
    )
    lists = [ones() for _ in range(1 + row.states)]
    if row.rule.has_numbers:
        lists[-1] = [one.clone() for _ in lists[0]]
    for context in (nullcontext(), waits_refused()):
        with context:
            for update in updates:
                grads = ones(torch.float16)
                ops.update_(lists[0], grads, *lists[1:], rule=row.rule, update=update)
