# SPDX-License-Identifier: BSD-3-Clause
"""Each script of the page on frameworks runs as it stands, where its package is installed."""

import sys
from pathlib import Path

import pytest
import torch

from code_blocks import Block, blocks_of
from integrations.small import WARNINGS, fork_ranks, needs

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))

pytestmark = WARNINGS


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.reason)
def test_a_script_of_the_page_trains(block: Block, tmp_path: Path) -> None:
    needs(block.reason.removeprefix("needs "))

    def run(rank: int) -> bool:
        torch.manual_seed(rank)
        if "install_apex_alias" in block.code:  # which the package has to see when it is imported
            forget(block.reason.removeprefix("needs ").partition(".")[0])
        exec(compile(block.code, block.reason, "exec"), {"__name__": "__main__"})
        return True

    assert fork_ranks(run, tmp_path, 1) == [True]


def test_every_script_says_what_it_needs() -> None:
    assert len(BLOCKS) == 9
    assert all(block.reason.startswith("needs ") for block in BLOCKS)
