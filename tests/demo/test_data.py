# SPDX-License-Identifier: BSD-3-Clause
"""The text: the same everywhere, split by file, nothing shared between the two parts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from cases.demo import TEXT
from preamp.core.errors import PreampUnavailableError
from preamp.demo.data import (
    held_out_batches,
    is_held_out,
    read_corpus,
    source_files,
    training_batches,
    windows,
)


def make_library(folder: Path, names: list[str], size: int = 20) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n".ljust(size, "x"), newline="\n")


def test_split_of_the_standard_library_is_repeatable_and_disjoint() -> None:
    first, second = read_corpus(), read_corpus()
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    folder = Path(ast.__file__).parent
    names = source_files(folder)
    assert "ast.py" in names
    sizes = [(folder / name).stat().st_size for name in names]
    assert len(first.train) + len(first.held_out) == sum(sizes)


def test_about_one_file_in_ten_is_held_out() -> None:
    held_out = sum(is_held_out(f"package/module_{index}.py") for index in range(10_000))
    assert 900 <= held_out <= 1100


def test_split_is_pinned() -> None:
    # A change here makes every published number incomparable with the ones before.
    names = ["abc.py", "argparse.py", "ast.py", "asyncio/tasks.py", "typing.py", "zipfile.py"]
    assert [name for name in names if is_held_out(name)] == ["ast.py"]


def test_source_files_are_sorted_and_leave_out_what_is_not_the_library(tmp_path: Path) -> None:
    kept = ["zlib.py", "email/parser.py", "test.py"]
    dropped = ["site-packages/torch/x.py", "test/test_ast.py", "unittest/test/a.py", "b.txt"]
    make_library(tmp_path, kept + dropped)
    assert source_files(tmp_path) == sorted(kept)


def test_library_without_sources_is_refused(tmp_path: Path) -> None:
    make_library(tmp_path, ["a.py"], size=20)
    what = "Python source in " + str(tmp_path)
    with pytest.raises(PreampUnavailableError, match=re.escape(what)):
        read_corpus(tmp_path)


def test_targets_are_the_bytes_after_the_inputs() -> None:
    batch = windows(TEXT, torch.tensor([0, 5]), 4)
    assert batch.inputs.tolist() == [TEXT[0:4].tolist(), TEXT[5:9].tolist()]
    assert batch.targets.tolist() == [TEXT[1:5].tolist(), TEXT[6:10].tolist()]


def test_batches_depend_on_the_seed_alone() -> None:
    def cut(seed: int) -> torch.Tensor:
        batches = training_batches(TEXT, steps=3, batch=2, context=8, seed=seed)
        return torch.stack([batch.inputs for batch in batches])

    torch.manual_seed(1)
    first = cut(0)
    torch.manual_seed(2)
    assert torch.equal(first, cut(0))
    assert not torch.equal(first, cut(1))


def test_held_out_windows_span_the_text_and_come_in_full_number() -> None:
    text = torch.arange(101, dtype=torch.uint8)
    batches = list(held_out_batches(text, count=5, batch=2, context=20))
    assert [len(batch.inputs) for batch in batches] == [2, 2, 1]
    assert batches[0].inputs[0, 0] == 0
    assert batches[-1].targets[-1, -1] == 100
