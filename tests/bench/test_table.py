# SPDX-License-Identifier: BSD-3-Clause
"""The table of benchmarks says what the rows say, and leaves open what nobody measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import table
from preamp_bench import records

MACHINE = {"device": "CPU", "torch": "2.9", "python": "3.12", "commit": "abc", "threads": 1}
UPDATE = {"parameters": 1000, "tensors": 10, "half": "float16", "clip": True}
NAMES = {"torch, naive": 1234.5, "GradScaler + fused AdamW": 4.0, "preamp O2, FusedAdam": 2.0}


def update(name: str, best: float, day: int = 1, **changes: object) -> records.Record:
    date = {"date": f"2026-01-0{day}", "name": name, "best": best, "status": "measured"}
    return {**MACHINE, **UPDATE, **date, **changes}


def test_a_line_has_the_latest_run_of_the_newest_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [update(name, best, day=2) for name, best in NAMES.items()]
    rows += [update("preamp O2 split, FusedAdam", 3.0, day=1)]  # of an earlier run
    rows += [update("torch, naive", 5.0, day=1, device="another")]
    rows += [update("torch, naive", 5.0, day=3, clip=False)]
    rows += [{**rows[0], **records.not_measured("preamp O2 compact, FusedAdam", "", "why")}]
    records.append(tmp_path / "step.jsonl", rows)
    step = {"model": "gpt", "level": "O5"}
    records.append(tmp_path / "train.jsonl", [update("preamp O5, FusedAdam", 9.0, **step)])
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["table.py"])
    table.main()
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| update of 1,000 in 10 | O2 | 1,234 | 4.00 | – | 2.00 | – | – | 0.50 | abc |",
        "| gpt | O5 | – | – | – | 9.00 | – | – | – | abc |",
    ]
