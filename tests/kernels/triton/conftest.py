# SPDX-License-Identifier: BSD-3-Clause
"""Modules of the Triton back end, and a look at what it launches."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ROOM = "preamp.kernels.triton"


@pytest.fixture
def ops(triton_ops: Any) -> Any:
    """Triton's back end alone."""
    return triton_ops


@pytest.fixture
def part(ops: Any) -> Any:
    """Return a module of the back end by its name."""
    return lambda name: importlib.import_module(f"{ROOM}.{name}")


@pytest.fixture
def launches(ops: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make contexts that note the name of every kernel launched inside."""
    kind = type(importlib.import_module(f"{ROOM}.updates").update_kernel)
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
