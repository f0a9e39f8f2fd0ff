# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark harness interleaves, compares within groups, and stores what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness
from harness import Variant, measure, provenance, store


def test_variants_take_turns() -> None:
    calls: list[str] = []
    variants = [
        Variant(
            name=name,
            group="g",
            run=lambda name=name: calls.append(name),
            prepare=lambda name=name: calls.append(f"prepare {name}"),
        )
        for name in "ab"
    ]
    measure(variants, rounds=5, warmup=1)
    assert calls[:4] == ["prepare b", "b", "prepare a", "a"]
    assert calls[4:8] == ["prepare a", "a", "prepare b", "b"]
    assert calls.count("a") == calls.count("b") == 6


def test_ratios_are_to_the_first_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(harness, "perf_counter", lambda: clock[0])

    def taking(seconds: float):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    rows = measure(
        [
            Variant(name="slow", group="g", run=taking(0.004)),
            Variant(name="fast", group="g", run=taking(0.001)),
            Variant(name="other", group="h", run=taking(0.002)),
        ],
        rounds=10,
    )
    assert [row.baseline for row in rows] == ["slow", "slow", "other"]
    assert [row.best for row in rows] == pytest.approx([4, 1, 2])
    assert [row.best_ratio for row in rows] == pytest.approx([1, 0.25, 1])
    assert rows[1].ratio_p20 == pytest.approx(0.25)
    assert rows[1].ratio_p80 == pytest.approx(0.25)


@pytest.mark.parametrize(("names", "rounds"), [("aa", 5), ("ab", 4)])
def test_what_cannot_be_compared_is_refused(names: str, rounds: int) -> None:
    variants = [Variant(name=name, group="g", run=lambda: None) for name in names]
    with pytest.raises(ValueError, match="names of their own, and at least 5 rounds"):
        measure(variants, rounds=rounds)


def test_rows_carry_their_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    rows = measure([Variant(name="a", group="g", run=lambda: None)], rounds=5)
    for _ in range(2):
        path = store("nothing", rows, provenance("cpu"))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2
    assert lines[0]["benchmark"] == "nothing"
    for key in ("device", "cores", "threads", "torch", "preamp", "commit", "date", "p50"):
        assert lines[0][key]
