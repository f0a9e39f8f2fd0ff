# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of statistics runs, and its clock is on all that a recorder does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import bench_numerics
from preamp.watch.recorder import Recorder
from preamp_bench import records


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bench_numerics.EVENTS:  # which it wraps, and are to be as before
        monkeypatch.setattr(Recorder, name, getattr(Recorder, name))
    out = tmp_path / "rows.jsonl"
    options = ["--levels", "O5", "--width", "16", "--batch", "2", "--seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", ["bench_numerics.py", *options, "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        bench_numerics.main()
    finally:
        torch.set_num_threads(threads)
    inside = {row["name"]: row["inside"] for row in records.read(out)}
    assert inside.keys() == {name for name in bench_numerics.WAYS}
    assert all(seconds > 0 for seconds in inside.values())
