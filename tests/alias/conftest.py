# SPDX-License-Identifier: BSD-3-Clause
"""The alias, on for one test."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """A process that forks a ``preamp run`` when asked to."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def preamp_run(zygote: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Call ``preamp run`` in a process of its own, in the test's folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = tmp_path / ".out", tmp_path / ".err"
        out.touch()
        err.touch()
        job = {"arguments": arguments, "folder": str(tmp_path), "out": str(out), "err": str(err)}
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        zygote.stdin.write(json.dumps(job) + "\n")
        zygote.stdin.flush()
        status = int(zygote.stdout.readline())
        done = subprocess.CompletedProcess(
            arguments, status, out.read_text("utf-8"), err.read_text("utf-8")
        )
        out.unlink()
        err.unlink()
        return done

    return run
