# SPDX-License-Identifier: BSD-3-Clause
"""``tools/gpu.sh`` on the pretended device: parts measure, write, and tell how they ended."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu.sh"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended device needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="it is built for Linux"),
]


def run(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), "--dry", str(folder), sys.executable, *parts]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_parts_measure_and_say_how_they_ended(tmp_path: Path) -> None:
    done = run(tmp_path, "memory", "step", "graphs")
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
