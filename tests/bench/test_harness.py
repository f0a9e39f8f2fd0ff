# SPDX-License-Identifier: BSD-3-Clause
"""The harness interleaves, compares within groups, and its rows say where they come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from preamp_bench import harness, records
from preamp_bench.harness import FEWEST_ROUNDS, Effort, Variant, measure, stopwatch

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


def test_only_the_work_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(harness, "perf_counter", lambda: clock[0])

    def passing(seconds: float):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    timed = stopwatch(passing(0.004), prepare=passing(1.0), synchronize=passing(0.001))
    assert timed() == pytest.approx(0.005)


def test_ratios_are_to_the_first_of_the_group() -> None:
    variants = [taking(4, "slow"), taking(1, "fast"), taking(2, "other", "h")]
    rows = measure(variants, SHORT)
    assert [row.baseline for row in rows] == ["slow", "slow", "other"]
    assert [row.best for row in rows] == pytest.approx([4, 1, 2])
    assert [row.best_ratio for row in rows] == pytest.approx([1, 0.25, 1])
    assert rows[1].ratio_p20 == pytest.approx(0.25)
    assert rows[1].ratio_p80 == pytest.approx(0.25)


def test_time_ends_a_measurement_and_rounds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(harness, "perf_counter", lambda: clock[0])

    def second() -> float:
        clock[0] += 1.0
        return 1.0

    variants = [Variant(name="a", group="g", seconds=second)]
    for effort, rounds in (
        (Effort(seconds=7.5, most=50), 8),
        (Effort(seconds=1e9, most=9), 9),
        (Effort(seconds=0, most=50), FEWEST_ROUNDS),
    ):
        assert measure(variants, effort)[0].rounds == rounds


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Each has a name of its own")):
        measure([taking(1, "a"), taking(1, "a")], SHORT)


@pytest.mark.parametrize(("least", "most"), [(5, 4), (1, 50)])
def test_too_few_rounds_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Got least={least} and most={most} rounds")):
        Effort(least=least, most=most)


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("one\ntwo"), "ValueError: one"), (RuntimeError(), "RuntimeError")],
)
def test_a_reason_is_one_line(error: Exception, reason: str) -> None:
    assert records.reason_of(error) == reason
    assert records.not_measured("a", "g", reason)["reason"] == reason
