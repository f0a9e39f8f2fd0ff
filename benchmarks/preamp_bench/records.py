# SPDX-License-Identifier: BSD-3-Clause
"""Rows as JSON lines: what was measured, what was not and why, and where."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import preamp
from preamp_bench.harness import Row

Record = dict[str, Any]
"""One line of a result file. Every line has ``benchmark``, ``name``, ``group``, ``status`` and the
provenance; lines of status ``"measured"`` have the fields of a row, the others a ``reason``."""


def measured(row: Row, **more: object) -> Record:
    """Make the record of a row."""
    return {**asdict(row), "status": "measured", **more}


def not_measured(name: str, group: str, reason: str, **more: object) -> Record:
    """Make the record of a variant that did not run."""
    return {"name": name, "group": group, "status": "not measured", "reason": reason, **more}


def reason_of(error: Exception) -> str:
    """Put an exception into one line: its class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def provenance(device: torch.device) -> Record:
    """Tell where and with what a measurement is made; part of every line."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_model(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "preamp": preamp.__version__,
        "commit": _commit(),
    }


def cpu_model() -> str:
    """Name the processor, as far as the system tells it, and what torch uses of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _commit() -> str:
    """The commit that this file is of, marked if the package differs; unknown without git."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=here.parent
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not just anybody's repository around us
        changed = git("status", "--porcelain", "--", str(here.parents[2] / "src"))
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Append records to a file, one JSON object a line; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def read(path: Path) -> list[Record]:
    """Read a result file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
