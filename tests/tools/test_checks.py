# SPDX-License-Identifier: BSD-3-Clause
"""The checks of docs and of the wheel find what is missing, and gpu.sh measures what it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from check_docs import undocumented, unexplained


def documented() -> None:
    """Do nothing."""


def bare() -> None: ...


class Half:
    """Has a docstring, unlike its method."""

    def method(self) -> None: ...


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __all__=list(names))
    return made


class Told:
    """Takes ``first``."""

    def method(self, first: int, second: int) -> None:
        """Take both."""


def test_gaps_are_named() -> None:
    home = module("m", documented=documented, bare=bare, Half=Half)
    assert undocumented(home, home, "::: m.bare\n::: m.Half\n") == [
        "m.documented: no '::: m.documented' in docs/api",
        "m.bare: no docstring",
        "m.Half.method: no docstring",
    ]
    home = module("m", Told=Told, documented=documented)
    texts = {"m.Told": "", "m.documented": ""}
    assert unexplained(home, texts) == ["m.Told.method: nothing tells what 'second' is"]
    assert unexplained(home, {"m.Told": "`second` comes last"}) == []


# -- gpu.sh on the pretended device ----------------------------------------------------------------


SCRIPT = Path(__file__).parents[2] / "tools" / "gpu.sh"


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux",
    reason="the pretended device is built by g++ for Linux",
)
def test_parts_measure_and_say_how_they_ended(tmp_path: Path) -> None:
    command = [SCRIPT, "--dry", tmp_path, sys.executable, "memory", "step", "graphs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    said = (tmp_path / "summary.txt").read_text(encoding="utf-8").splitlines()
    assert said[0].endswith(" pretended")
    ends = [line.split(", ")[0] for line in said[1:]]
    assert ends[1:] == ["step: done", "graphs: skipped"]
    if shutil.which("compute-sanitizer") is None:  # which is no success
        assert ends[0] == "memory: skipped"
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    # Other packages may be missing.
    ours = [row for row in rows if row["name"].startswith("preamp")]
    assert {row["status"] for row in ours} == {"measured"}
    assert {row["device"] for row in rows} == {"pretended"}
