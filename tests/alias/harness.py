# SPDX-License-Identifier: BSD-3-Clause
"""Processes that run programs under the alias."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from preamp.cli import main as main_module

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


def run_python(arguments: Sequence[str], folder: Path, **environment: str) -> Done:
    """Run Python in a process of its own, and return what came of it."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def written(folder: Path, name: str, text: str) -> str:
    """The path of a file of the program, in a folder that is made for it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return str(path)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit status of ``preamp`` in this process."""
    monkeypatch.setattr(sys, "argv", ["preamp", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the folder of a program comes first there
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    return caught.value.code


class Zygote:
    """The process that ``zygote.py`` describes; a context manager."""

    def __init__(self, *modules: str) -> None:
        """Start it; every program will find ``modules`` imported."""
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("zygote.py")), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def preamp_run(self, arguments: Sequence[str], folder: Path) -> Done:
        """Call ``preamp run`` in a process of its own, in ``folder``."""
        return self.preamp(("run", *arguments), folder)

    def preamp(self, arguments: Sequence[str], folder: Path) -> Done:
        """Call ``preamp`` in a process of its own, in ``folder``."""
        out, err = folder / ".out", folder / ".err"
        out.write_text("", "utf-8")
        err.write_text("", "utf-8")
        paths = {"folder": str(folder), "out": str(out), "err": str(err)}
        job = {"arguments": list(arguments), **paths}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(
            list(arguments), status, out.read_text("utf-8"), err.read_text("utf-8")
        )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()
