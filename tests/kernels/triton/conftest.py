# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton's kernels: compiled where there is a GPU, else through its interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernels are first imported

ROOM = "preamp.kernels.triton"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the interpreter's numpy meet infinities, overflow and, when old, new deprecations."""
    for item in items:
        if item.path.parent == item.config.rootpath / "tests" / "kernels" / "triton":
            for category in ("RuntimeWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}:triton"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def ops() -> Any:
    """The back end; a test that needs it is skipped where it cannot run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    room: Any = importlib.import_module(ROOM)
    standard = importlib.import_module("triton.language")
    compiled = importlib.import_module("triton").JITFunction
    if not torch.cuda.is_available() and isinstance(standard.zeros, compiled):
        pytest.skip("Triton was imported before its interpreter could be chosen")
    return room


@pytest.fixture
def part(ops: Any) -> Any:
    """Return a module of the back end by its name."""
    return lambda name: importlib.import_module(f"{ROOM}.{name}")


@pytest.fixture
def launches(ops: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make contexts that note the name of every kernel launched inside."""
    kind = type(importlib.import_module(f"{ROOM}.device.adam").adam_kernel)
    start = kind.__getitem__
    notes: list[str] = []

    def noted(kernel: Any, grid: Any) -> Any:
        notes.append(kernel.fn.__name__)
        return start(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", noted)

    @contextmanager
    def noting() -> Iterator[list[str]]:
        notes.clear()
        yield notes

    return noting
