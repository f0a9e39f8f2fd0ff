# SPDX-License-Identifier: BSD-3-Clause
"""Processes that have the alias."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from alias.harness import Run, Zygote, run_python


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Python in a process of its own, in the test's folder."""
    return lambda *arguments, **environment: run_python(arguments, tmp_path, **environment)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """The process behind ``preamp_run``."""
    with Zygote() as process:
        yield process


@pytest.fixture
def preamp_run(zygote: Zygote, tmp_path: Path) -> Run:
    """``preamp run`` in a process of its own, in the test's folder."""
    return lambda *arguments: zygote.preamp_run(arguments, tmp_path)
