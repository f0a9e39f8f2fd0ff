# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of the host's update measures updates, in every storage and beside a copy."""

from __future__ import annotations

import pytest
import torch

import bench_storage


@pytest.mark.parametrize("threads", [1, 2])
def test_it_times_every_storage(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        rows = bench_storage.host_updates(4096, threads, seconds=0.0)
    finally:
        torch.set_num_threads(before)
    groups = ["1 thread", "2 threads"][:threads]
    names = [f"{name}, {group}" for group in groups for name in ("copy", *bench_storage.UPDATED)]
    assert [row["name"] for row in rows] == names
    for row in rows:
        each = bench_storage.UPDATED.get(row["name"].partition(",")[0], 4.0)
        assert row["gb_s"] * row["best"] == pytest.approx(each * 4096 / 1e6)
