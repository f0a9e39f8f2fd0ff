# SPDX-License-Identifier: BSD-3-Clause
"""The page of benchmarks says what the rows say, and that a number is missing where it is."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import plots
import report
from preamp_bench import records
from preamp_bench.records import Record

MACHINE = {
    **{"device": "CPU 9000", "cpu": "CPU 9000", "cores": 4, "threads": 1, "python": "3.12.1"},
    **{"torch": "2.9.0", "preamp": "1.0", "commit": "abc", "date": "2026-01-01T00:00:00"},
}
TIMES = {
    **{"p20": 2.0, "p50": 2.5, "p80": 3.0, "ratio_p20": 0.4, "ratio_p50": 0.5, "ratio_p80": 0.6},
    **{"rounds": 9, "status": "measured"},
}


def step_row(name: str, best: float, ratio: float, **changes: object) -> Record:
    case = {"parameters": 1000, "tensors": 10, "half": "float16", "clip": True, "group": "float16"}
    values = {"best": best, "best_ratio": ratio, "share_of_copy": 0.25, "baseline": "torch, naive"}
    return {**MACHINE, **TIMES, **case, **values, "name": name, **changes}


def train_row(name: str, best: float, ratio: float, **changes: object) -> Record:
    case = {"model": "gpt", "width": 8, "batch": 2, "level": "O5", "group": "O5"}
    memory = {"weights": 2, "masters": 4, "gradients": 2, "optimizer_state": 8, "peak_bytes": 5e6}
    values = {"best": best, "best_ratio": ratio, "baseline": "O5 by hand"}
    return {**MACHINE, **TIMES, **case, **memory, **values, "name": name, **changes}


STEPS = [
    step_row("torch, naive", 8.0, 1.0),
    step_row("preamp O2, FusedAdam", 2.0, 0.25),
    step_row("torch, naive", 8.0, 1.0, tensors=100),
    step_row("preamp O2, FusedAdam", 6.0, 0.75, tensors=100),
]
TRAINS = [
    train_row("O5 by hand", 10.0, 1.0, to_autocast=1.5),
    train_row("preamp O5, FusedAdam", 9.0, 0.9, to_autocast=0.875),
]


def test_page_says_what_the_rows_say() -> None:
    page = report.render(STEPS, TRAINS)
    assert "| float16 | preamp O2, FusedAdam | 2.00 ms · 0.25× · 25.0% | 6.00 ms · 0.75×" in page
    assert "| preamp O2, FusedAdam |  | 0.25–0.75× |  |  |" in page
    assert "| preamp O5, FusedAdam | 9.00 ms | 0.90× | 0.40–0.60 | 0.88× | 5 MB | 16.0 |" in page
    assert "CPU 9000, 4 cores, torch 2.9.0, Python 3.12.1, commit `abc`" in page
    assert "- Any GPU." in page


def test_only_the_latest_run_counts() -> None:
    later = {"date": "2026-02-01T00:00:00", "commit": "def"}
    newer = [step_row("torch, naive", 4.0, 1.0, **later)]
    page = report.render([*newer, *STEPS], [])
    assert "4.00 ms" in page
    assert "2.00 ms" not in page  # the earlier run of that case, its other variants included
    assert "6.00 ms" in page  # of another case
    assert "commit `def`" in page


def test_what_was_not_measured_is_said() -> None:
    failed = records.not_measured("flashoptim", "float16", "needs a GPU")
    base = {key: STEPS[0][key] for key in (*MACHINE, "parameters", "tensors", "half", "clip")}
    page = report.render([*STEPS[2:], {**base, **failed}], [])
    assert "| float16 | flashoptim | not measured | not measured |" in page
    assert "- flashoptim (1,000 in 10): needs a GPU" in page
    assert page.count("Not measured.") == 7  # all sections but the first


def test_a_failed_loop_has_a_line() -> None:
    failed = records.not_measured("O5 by hand", "O5", "no kernel")
    base = {key: TRAINS[0][key] for key in (*MACHINE, "model", "width", "batch", "level")}
    unknown = train_row("preamp O5, FusedAdam", 9.0, 1.0, peak_bytes=None)
    page = report.render([], [unknown, {**base, **failed}])
    assert "| O5 by hand | not measured |" in page
    assert "- O5 by hand: no kernel" in page
    assert "| not measured | 16.0 |" in page


@pytest.mark.parametrize("draw", ["step", "train"])
def test_figures_are_readable_documents_and_reproducible(draw: str) -> None:
    make, rows = {"step": (plots.draw_step, STEPS), "train": (plots.draw_train, TRAINS)}[draw]
    text = make(rows)
    assert make(rows) == text
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert root[0].tag.endswith("title")
    assert "prefers-color-scheme:dark" in text
    assert "currentColor" in text
    for name in ("gpt",) if draw == "train" else ("torch, naive", "preamp O2/O5, FusedAdam"):
        assert name in text


def test_page_and_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.main()
    assert {path.name for path in tmp_path.iterdir()} == {"benchmarks.md"}
    records.append(tmp_path / "step.jsonl", STEPS)
    records.append(tmp_path / "train.jsonl", TRAINS)
    report.main()
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    for figure in ("benchmarks-step.svg", "benchmarks-train.svg"):
        assert f"]({figure})" in page
        assert (tmp_path / figure).exists()


def test_page_has_the_latest_import_times() -> None:
    row: Record = {**MACHINE, "benchmark": "import", "best": 61.4, "p50": 70.0, "worst": 99.6}
    older = {**row, "rounds": 15, "best": 400.0, "date": "2025-01-01T00:00:00"}
    page = report.render([], [], [older, {**row, "rounds": 15}])
    assert "commit `abc` | 61 ms | 70 ms | 100 ms | 15 |" in page
    assert "400" not in page


def numerics_row(name: str, **changes: object) -> Record:
    case = {"model": "gpt", "width": 8, "batch": 2, "level": "O5", "group": "numerics"}
    size = {"parameters": 12345, "tensors": 53, "interval": 100}
    return {**MACHINE, **TIMES, **case, **size, "name": name, "best": 50.0, **changes}


def test_page_has_the_latest_cost_of_statistics() -> None:
    measured = {"overhead": 0.0031, "overhead_of_whole_steps": -0.004}
    rows = [
        numerics_row("off", inside=0.02),
        numerics_row("light, between", inside=0.25),
        numerics_row("light, measuring", inside=12.5, **measured),
        numerics_row("full, between", inside=0.25),
        numerics_row("full, measuring", inside=40.0, **{**measured, "overhead": 0.0123}),
    ]
    older = numerics_row("off", inside=9.0, date="2025-01-01T00:00:00")
    page = report.render([], [], [], [older, *rows])
    head = "| O5 | 2 | 53, 12,345"
    assert f"{head} | off | 50.00 ms | 0.02 ms | | |" in page
    assert f"{head} | light | 50.00 ms | 0.25 ms | 12.50 ms | 0.31% (-0.4%) |" in page
    assert f"{head} | full | 50.00 ms | 0.25 ms | 40.00 ms | 1.23% (-0.4%) |" in page
    assert "9.00 ms" not in page


def test_page_compares_the_fused_half_step_with_its_aims() -> None:
    scaler = step_row("GradScaler + fused AdamW", 3.0, 1.0, group="float32")
    page = report.render([*STEPS[:2], scaler], [])
    assert (
        "| float16 | 1,000 | 10 | yes | 4.00× | 1.50× (1.6×) | 25% | 2000.00 | CPU 9000 |" in page
    )


def test_page_has_steps_on_ranks_and_what_is_derived() -> None:
    case = {"width": 8, "ranks": 2, "parameters": 288, "group": "DDP"}
    rows: list[Record] = [
        {**MACHINE, **TIMES, **case, "name": name, "best": best, "best_ratio": ratio}
        for name, best, ratio in (
            ("plain DDP", 4.0, 1.0),
            ("preamp O5", 3.0, 0.75),
            ("all-reduce, 16 bytes", 0.5, 1.0),
        )
    ]
    page = report.render([], [], [], [], rows)
    assert "| preamp O5 | 3.00 ms | 2.50 ms | 0.75× | 0.40–0.60 |" in page
    assert "| 16 bytes | 0.50 ms | 1.50 ms | 3.00 ms | 5.00 ms |" in page


def test_page_says_what_each_back_end_takes_and_the_books() -> None:
    case = {"parameters": 12345, "tensors": 10, "half": "bfloat16", "clip": False}
    rows: list[Record] = [
        {**MACHINE, **TIMES, **case, "part": "kernels", "group": "LAMB", "copied": 500_000} | more
        for more in (
            {"name": "reference", "best": 9.0, "best_ratio": 1.0},
            {"name": "jit", "best": 3.0, "best_ratio": 0.333},
            {"name": "copy", "best": 0.2, "best_ratio": 0.02},
        )
    ]
    rows += [
        {**MACHINE, **TIMES, **case, "part": "bookkeeping", "name": name, "each": each}
        for name, each in (("grad", 80.0), ("versions", 70.0), ("O5, FusedAdam", 2500.0))
    ]
    page = report.render([], [], part_rows=rows)
    assert "| LAMB | 9.00 ms · 1.00× | 3.00 ms · 0.33× | 20.0 GB/s |" in page
    assert "| O5, FusedAdam | 10 | 2.50 µs | 0.08 µs | 0.07 µs |" in page
