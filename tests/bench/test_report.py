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

LONGEST = 150  # lines of the page

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
    scaler = step_row("GradScaler + fused AdamW", 3.0, 1.0, group="float32")
    split = step_row("preamp O2 split, FusedAdam", 1234.5, 0.5)
    page = report.render([*STEPS, scaler, split], TRAINS)
    times = "3.00 | 8.00 | – | – | – | 2.00 | 1,234 | –"
    assert f"| 1,000 | 10 | float16 | {times} | 1.50× | 25% |" in page
    assert "| 1,000 | 100 | float16 | – | 8.00 | – | – | – | 6.00 | – | – | – | 25% |" in page
    assert "| O5 | preamp, FusedAdam | 9.00 ms | 0.90× | 0.88× | 16.0 | 5 MB |" in page
    assert "CPU 9000, 4 cores, torch 2.9.0, Python 3.12.1, commits `abc`." in page
    assert "Not measured: any GPU." in page


def test_page_begins_with_what_was_found() -> None:
    scaler = step_row("GradScaler + fused AdamW", 3.2, 1.0, group="float32")
    ways = [storage_row("float32", [2.0, 4.0], 16.0), storage_row("O5 split", [2.5, 4.5], 14.0)]
    ways = [{**row, "device": "CPU 1", "cpu": "CPU 1"} for row in ways]
    page = " ".join(report.render([scaler, *STEPS], TRAINS, ways).split())
    assert page.startswith(
        "# Benchmarks The update is 1.60 times as fast as GradScaler's. A step at O5 takes 0.88 "
        "times as long as with autocast. Split and compact storage score as float32 does, within "
        "what another seed changes. No GPU was measured. The tables are of two machines, named "
        "above each. ## How it was measured"
    )
    far = storage_row("O5 compact", [9.0, 9.0], 8.0, device="CPU 1", cpu="CPU 1")
    page = " ".join(report.render([], [], [*ways, far]).split())
    assert "Beyond what another seed changes, O5 compact score unlike float32. No GPU" in page
    assert "The tables are of one machine, named" in page
    assert "as fast as" not in page.partition("## How")[0]
    on_gpu = {**STEPS[1], "device": "GPU"}
    assert "No GPU was measured" not in report.render([on_gpu], [])
    assert report.render([], []).startswith("# Benchmarks\n\n## How it was measured\n")


def test_what_was_reached_is_counted() -> None:
    scaler = step_row("GradScaler + fused AdamW", 3.2, 1.0, group="float32")
    fast = {"share_of_copy": 0.9}
    steps = [scaler, step_row("preamp O2, FusedAdam", 2.0, 0.25, **fast), *STEPS[2:]]
    slow = train_row("preamp O4, torch AdamW", 9.0, 1.03, level="O4", to_autocast=0.5)
    page = " ".join(report.render(steps, [*TRAINS, slow]).split())
    # Of 100 tensors there is no aim.
    assert "Reached in all of the 1 cases. The update was 1.60 times" in page
    assert "90% of a copy's speed.** Reached in 1 of the 2 cases. In the others" in page
    assert "Reached by 1 of the 2 loops with preamp. Missed by O4, torch AdamW (gpt), at" in page
    assert "Reached by all of the 1 loops. A step took 0.88 times as long as with autocast." in page


def test_an_aim_that_is_missed_everywhere_is_said_so() -> None:
    scaler = step_row("GradScaler + fused AdamW", 3.1, 1.0, group="float32")
    page = " ".join(report.render([scaler, *STEPS], []).split())
    assert "Reached in none of the 1 cases. The update was 1.55 times as fast." in page
    assert "Reached in none of the 2 cases." in page


def test_only_the_latest_run_of_the_newest_machine_counts() -> None:
    later = {"date": "2026-02-01T00:00:00", "commit": "def"}
    newer = [step_row("torch, naive", 4.0, 1.0, **later)]
    elsewhere = step_row("torch, naive", 7.0, 1.0, tensors=3, device="CPU 1")
    page = report.render([*newer, *STEPS, elsewhere], [])
    assert "| 4.00 |" in page
    assert "2.00" not in page  # the earlier run of that case, its other variants included
    assert "| 6.00 |" in page  # of another case
    assert "7.00" not in page
    assert "commits `def`, `abc`" in page


@pytest.mark.parametrize("changes", [{"clip": False}, {"threads": 2}], ids=str)
def test_the_update_is_shown_with_clipping_on_one_thread(changes: dict[str, object]) -> None:
    other = step_row("torch, naive", 5.0, 1.0, date="2026-02-01T00:00:00", **changes)
    assert "5.00" not in report.render([*STEPS, other], [])


def test_what_was_not_measured_is_said() -> None:
    failed = records.not_measured("torch.compile", "float16", "needs a compiler.")
    peer = records.not_measured("flashoptim", "bfloat16 only", "needs a GPU")
    base = {key: STEPS[0][key] for key in (*MACHINE, "parameters", "tensors", "half", "clip")}
    page = report.render([*STEPS, {**base, **failed}, {**base, **peer}], [])
    assert "Not measured: torch.compile (needs a compiler); any GPU." in page
    assert page.count("Not measured.") == 2  # all tables but the first


def test_a_failed_loop_has_a_line() -> None:
    failed = records.not_measured("O5 by hand", "O5", "no kernel")
    base = {key: TRAINS[0][key] for key in (*MACHINE, "model", "width", "batch", "level")}
    unknown = train_row("preamp O5, FusedAdam", 9.0, 1.0, peak_bytes=None)
    page = report.render([], [unknown, {**base, **failed}])
    assert "| O5 | by hand | not measured |" in page
    assert "O5 by hand (no kernel)" in page
    assert "| 16.0 | not measured |" in page


def storage_row(name: str, scores: list[float], held: float, **changes: object) -> Record:
    case = {"task": "gpt", "steps": 400, "seeds": 2, "group": "gpt", "status": "measured"}
    values = {"scores": {"bits": scores, "bytes per parameter": [held, held]}}
    return {**MACHINE, **case, **values, "name": name, **changes}


def test_scores_stand_beside_the_memory_they_take() -> None:
    failed = {**storage_row("peer", [], 0.0), "status": "not measured", "reason": "none"}
    rows = [
        storage_row("O5 compact", [2.5, 4.5], 8.0),
        storage_row("O5", [2.0, 4.0], 16.0),
        failed,
        storage_row("float32", [2.0, 4.0], 16.0),
    ]
    lines = report.render([], [], rows).splitlines()
    start = lines.index("| trained as | gpt: bits | to float32 | B/param |")
    assert lines[start + 2 : start + 6] == [
        "| float32 | 3.0000 | ± 1.4142 | 16.00 |",
        "| O5 | 3.0000 | +0.0000 ± 0.0000 | 16.00 |",
        "| O5 compact | 3.5000 | +0.5000 ± 0.0000 | 8.00 |",
        "| peer | not measured |  |  |",
    ]
    page = " ".join(lines)
    assert "float32: all of the 2 scores with O5 are no further." in page
    page = " ".join(
        report.render([], [], [*rows, storage_row("O5 split", [3.5, 5.5], 14.0)]).split()
    )
    assert "2 of the 3 scores with O5 are no further. Beyond it are O5 split (gpt: bits)." in page


def test_the_page_in_the_repository_is_that_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = (report.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.main()
    assert (tmp_path / "benchmarks.md").read_text(encoding="utf-8") == committed
    assert len(committed.splitlines()) <= LONGEST
    for table in ("## The update", "## Whole steps", "## Memory and accuracy"):
        assert f"{table}\n" in committed
    assert "Not measured.\n" not in committed  # rows that a table needs are not lost


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
