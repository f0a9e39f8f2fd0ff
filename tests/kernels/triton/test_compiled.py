# SPDX-License-Identifier: BSD-3-Clause
"""What NVIDIA's GPUs get of an update, as the compiler for them says; no GPU is needed."""

from __future__ import annotations

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
def updates() -> list[dict[str, Any]]:
    """Rows of ``compiling.py``, in a process whose kernels are not interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    version = importlib.metadata.version("triton").split(".")
    if tuple(map(int, version[:2])) < (3, 6):
        pytest.skip("its compiler has other names")
    script = Path(__file__).with_name("compiling.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, script, *map(str, ARCHS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.full
def test_updates_on_nvidia(updates: list[dict[str, Any]]) -> None:
    """Rounding is exact, and four blocks of 128 threads fit into a multiprocessor's registers.

    A barrier in the loop is one wait of all threads for each block of 1,024 elements.
    """
    assert {row["arch"] for row in updates} == set(ARCHS)
    for row in updates:
        assert row["fused"] == row["inexact"] == 0, row
        assert row["registers"] <= 128, row
        assert row["spilled"] == 0, row
        assert row["moves"] == (2 if row["update"] == "adam-compact" else 0), row
