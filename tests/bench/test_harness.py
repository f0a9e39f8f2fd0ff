# SPDX-License-Identifier: BSD-3-Clause
"""The harness interleaves and compares, rows say where they come from, and tables what rows say."""

import json
from pathlib import Path

import pytest
import torch

import table
from preamp_bench import records
from preamp_bench.harness import FEWEST_ROUNDS, Effort, Variant, measure, stopwatch
from preamp_bench.memory import Peak

SHORT = Effort(seconds=0, most=FEWEST_ROUNDS, warmup=1)


def taking(milliseconds: float, name: str, group: str = "g") -> Variant:
    return Variant(name=name, group=group, seconds=lambda: milliseconds / 1e3)


def test_variants_take_turns() -> None:
    calls: list[str] = []
    variants = [
        Variant(
            name=name,
            group="g",
            seconds=stopwatch(
                lambda name=name: calls.append(name),
                prepare=lambda name=name: calls.append(f"prepare {name}"),
            ),
        )
        for name in "ab"
    ]
    measure(variants, SHORT)
    assert calls[:4] == ["prepare a", "a", "prepare b", "b"]
    assert calls[4:12] == [*calls[:4], "prepare b", "b", "prepare a", "a"]
    assert calls.count("a") == calls.count("b") == FEWEST_ROUNDS + 1


def test_ratios_are_to_the_first_of_the_group() -> None:
    variants = [taking(4, "slow"), taking(1, "fast"), taking(2, "other", "h")]
    rows = measure(variants, SHORT)
    assert [row.baseline for row in rows] == ["slow", "slow", "other"]
    assert [row.best for row in rows] == pytest.approx([4, 1, 2])
    assert [row.best_ratio for row in rows] == pytest.approx([1, 0.25, 1])
    assert rows[1].ratio_p20 == pytest.approx(0.25)
    assert rows[1].ratio_p80 == pytest.approx(0.25)


def test_rows_carry_their_provenance(tmp_path: Path) -> None:
    rows = measure([taking(1, "a")], SHORT)
    facts = records.provenance(torch.device("cpu"))
    path = tmp_path / "new" / "rows.jsonl"
    for _ in range(2):
        records.append(path, [records.measured(row, **facts) for row in rows])
    lines = records.read(path)
    assert len(lines) == 2
    assert lines[0]["status"] == "measured"
    for key in ("device", "cores", "threads", "torch", "preamp", "commit", "date", "p50"):
        assert lines[0][key]
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1]) == lines[1]


# -- peak memory ------------------------------------------------------------------------------


MEGABYTES = 64
CPU = torch.device("cpu")


def fill() -> None:
    torch.ones(MEGABYTES * 2**20, dtype=torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_a_tensor_that_is_gone_again_counts() -> None:
    fill()
    peak = Peak(CPU)
    before = peak.bytes()
    fill()
    after = peak.bytes()
    assert before is not None
    assert after is not None
    assert before < MEGABYTES * 2**20 / 2
    assert after > MEGABYTES * 2**20 * 0.9


# -- the table --------------------------------------------------------------------------------


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
