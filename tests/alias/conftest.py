# SPDX-License-Identifier: BSD-3-Clause
"""The alias, on for one test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import preamp

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def alias() -> Iterator[None]:
    """Install the alias; afterwards remove it."""
    preamp.install_apex_alias()
    yield
    preamp.remove_apex_alias()


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python in a process of its own, in an empty folder, and return what came of it."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    return run
