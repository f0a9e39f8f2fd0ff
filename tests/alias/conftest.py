# SPDX-License-Identifier: BSD-3-Clause
"""The alias for one test, and processes that have it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import preamp
from alias.harness import Run, Zygote, run_python


@pytest.fixture
def alias() -> Iterator[None]:
    """Install the alias; afterwards remove it."""
    preamp.install_apex_alias()
    yield
    preamp.remove_apex_alias()


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
