# SPDX-License-Identifier: BSD-3-Clause
"""The back ends under test; Triton's kernels are interpreted where there is no GPU."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cases.back_ends import EVERY, Elsewhere
from cases.interpreted import patch_language_once

ROOM = "preamp.kernels.triton"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the interpreter's numpy meet infinities, overflow and, when old, new deprecations."""
    for item in items:
        if item.nodeid.startswith("tests/kernels/"):
            for category in ("RuntimeWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}:triton"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_ops() -> Any:
    """Triton's back end; a test that needs it is skipped where it cannot run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    room: Any = importlib.import_module(ROOM)
    standard = importlib.import_module("triton.language")
    compiled = importlib.import_module("triton").JITFunction
    if not torch.cuda.is_available():
        assert not isinstance(standard.zeros, compiled), "Triton was imported to compile"
        patch_language_once()
    return room.Triton()


@pytest.fixture(params=[*EVERY, "triton"])
def ops(request: pytest.FixtureRequest) -> Any:
    """Each back end, for tensors of the CPU; of accelerators on one, where there is one."""
    name = request.param
    found = request.getfixturevalue("triton_ops") if name == "triton" else EVERY[name]
    is_elsewhere = torch.cuda.is_available() and name == "triton"
    return Elsewhere(found, torch.device("cuda")) if is_elsewhere else found


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the number of threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
