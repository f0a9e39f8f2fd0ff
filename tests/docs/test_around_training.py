# SPDX-License-Identifier: BSD-3-Clause
"""The block of the page that needs several ranks trains one model on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import preamp
from cases.ranks import run_ranks
from cases.tolerances import assert_same
from code_blocks import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "around-training.md"


def broadcast(rank: int) -> list[torch.Tensor]:
    """Run it from other weights on each rank, then a step on the same data."""
    first, *others = blocks_of(PAGE.read_text(encoding="utf-8"))
    (block,) = [other for other in others if "broadcast" in other.code]
    assert block.reason
    names: dict[str, Any] = {}
    exec(first.code, names)
    torch.manual_seed(rank)
    exec(block.code.partition("train_step")[0], names)
    torch.manual_seed(0)  # nothing reduces gradients here
    names["train_step"](names["model"], names["optimizer"])
    halves = [param.detach().clone() for param in names["model"].parameters()]
    masters = [param.detach().clone() for param in preamp.master_params(names["optimizer"])]
    return halves + masters


def test_ranks_that_broadcast_as_on_the_page_train_one_model(tmp_path: Path) -> None:
    first, second = run_ranks(broadcast, tmp_path)
    assert len(first) == 8
    for mine, theirs in zip(first, second, strict=True):
        assert_same(mine, theirs)
