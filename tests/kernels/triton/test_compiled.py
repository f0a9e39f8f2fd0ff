# SPDX-License-Identifier: BSD-3-Clause
"""What NVIDIA's GPUs get of an update, as the compiler for them says; no GPU is needed."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ARCHS = (80, 89, 90, 100)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is said by ``compiling.py``, in a process whose kernels are not interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    version = importlib.metadata.version("triton").split(".")
    if tuple(map(int, version[:2])) < (3, 6):
        pytest.skip("earlier compilers take and return what a kernel is in other forms")
    script = Path(__file__).with_name("compiling.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(script.parents[2])  # where the cases are
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    call = [sys.executable, script, *map(str, ARCHS)]
    ran = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


# Registers that a thread may take; with 80, six blocks of 128 threads fit into a multiprocessor,
# with 169 to 255 two.
MOST = {"adam-compact": 216}


@pytest.mark.full
def test_updates_on_nvidia(compiled: dict[str, Any]) -> None:
    """Rounding is exact, nothing is spilled, and registers and waits stay as few as they are.

    A barrier in the loop is one wait of all threads for each block of 1,024 elements.
    """
    updates: list[dict[str, Any]] = compiled["updates"]
    assert {row["arch"] for row in updates} == set(ARCHS)
    for row in updates:
        assert row["fused"] == row["inexact"] == row["stack"] == 0, row
        assert row["registers"] <= MOST.get(row["update"], 80), row
        assert row["moves"] == (2 if row["update"] == "adam-compact" else 0), row


@pytest.mark.full
def test_addresses_have_64_bits(compiled: dict[str, Any]) -> None:
    """So that tensors, and lists, may have more than 2**31 elements."""
    assert compiled["narrow"] == {
        name: []
        for name in (
            *("update_kernel", "measure_chunks", "gather_kernel"),
            *("combine_kernel", "convert_kernel", "average_norms"),
        )
    }
    assert not any(compiled["specialised"].values())


@pytest.mark.full
def test_memory_is_moved_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    """Of an update four loads and three stores."""
    assert compiled["wide"] == {"update_kernel": 7, "measure_chunks": 1}
