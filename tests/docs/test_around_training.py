# SPDX-License-Identifier: BSD-3-Clause
"""The block of the page that needs several ranks trains one model on two."""

from pathlib import Path
from typing import Any

import torch

import preamp
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from code_blocks import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "around-training.md"


def blocks() -> tuple[Any, list[Any]]:
    """The page's first block, and those that need several ranks."""
    first, *others = blocks_of(PAGE.read_text(encoding="utf-8"))
    found = [other for other in others if "torch.distributed" in other.code]
    assert all(block.reason for block in found)
    return first, found


def broadcast(rank: int) -> list[list[torch.Tensor]]:
    """Run them from other weights on each rank, with a step on the same data after each."""
    first, others = blocks()
    names: dict[str, Any] = {}
    exec(first.code, names)
    found: list[list[torch.Tensor]] = []
    for number, block in enumerate(others):
        torch.manual_seed(rank)
        if number:  # nothing reduces gradients here
            names["train_step"](names["model"], names["optimizer"])
            names["optimizer"].state.clear()
        start, step, rest = block.code.partition("train_step(model, optimizer)\n")
        exec(start, names)
        if step:
            torch.manual_seed(0)
            names["train_step"](names["model"], names["optimizer"])
            found.append(weights(names))
            torch.manual_seed(rank)
            names["train_step"](names["model"], names["optimizer"])
            names["optimizer"].state.clear()
            exec(rest, names)
        torch.manual_seed(0)
        names["train_step"](names["model"], names["optimizer"])
        found.append(weights(names))
    return found


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    halves = [param.detach().clone() for param in names["model"].parameters()]
    return halves + [p.detach().clone() for p in preamp.master_params(names["optimizer"])]


def test_ranks_that_broadcast_and_average_as_on_the_page_train_one_model(tmp_path: Path) -> None:
    first, second = run_ranks(broadcast, tmp_path)
    assert len(first) == 3
    assert not torch.equal(first[0][0], first[1][0])
    for number, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert len(mine) == 8
        for one, other in zip(mine, theirs, strict=True):
            if number == 1:  # averages of half weights, below whose digits masters differ
                torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-8)
            else:
                assert_same(one, other)
