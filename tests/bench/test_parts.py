# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of a step's parts runs, and leaves the ops as they were."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import bench_parts
from preamp.kernels.by_device import ByDevice
from preamp_bench import records


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(ByDevice))
    out = tmp_path / "rows.jsonl"
    options = ["--sizes", "1000/10", "--books", "10", "--seconds", "0.01", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_parts.py", *options])
    threads = torch.get_num_threads()
    try:
        bench_parts.main()
    finally:
        torch.set_num_threads(threads)
    assert dict(vars(ByDevice)) == before
    rows = records.read(out)
    assert {row["group"] for row in rows if row["part"] == "kernels"} == bench_parts.RULES.keys()
    books = [row["name"] for row in rows if row["part"] == "bookkeeping"]
    assert {"O2, FusedAdam", "O5, FusedAdam"} <= set(books)
