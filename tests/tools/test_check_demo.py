# SPDX-License-Identifier: BSD-3-Clause
"""The check of the demo's results passes good ones and finds bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from cases.levels import WITH_MASTERS
from check_demo import problems_of

WEIGHTS = {"O2": "fp16", "O3": "fp16", "O5": "bf16"}


def row(level: str) -> dict[str, Any]:
    masters = level in WITH_MASTERS
    return {
        "level": level,
        "status": "finished",
        "reason": "",
        "steps_done": 2,
        "steps_skipped": 0,
        "losses": [8.0, 7.0],
        "best_seconds": 1.0,
        "median_seconds": 2.0,
        "held_out_ratio": 1.0,
        "dtypes": {"weights": WEIGHTS.get(level, "fp32"), "masters": "fp32" if masters else "none"},
        "memory": {"weights": 2.0 if level in WEIGHTS else 4.0, "masters": 4.0 if masters else 0.0},
    }


def document() -> dict[str, Any]:
    return {"interrupted": False, "levels": [row(f"O{number}") for number in range(6)]}


def test_good_results_pass() -> None:
    assert problems_of(document(), 2) == []


@pytest.mark.parametrize(
    ("level", "change", "expected"),
    [
        ("O1", {"status": "refused", "reason": "why"}, "O1: refused: why"),
        ("O0", {"steps_done": 1}, "O0: 1 steps done"),
        ("O0", {"best_seconds": None}, "O0: step times"),
        ("O0", {"losses": [7.0, 8.0]}, "O0: loss went"),
        ("O5", {"held_out_ratio": 1.02}, "O5: held-out"),
        ("O2", {"dtypes": {"weights": "fp32", "masters": "fp32"}}, "O2: weights are fp32"),
        ("O2", {"dtypes": {"weights": "fp16", "masters": "none"}}, "O2: masters are none"),
        ("O4", {"memory": {"weights": 4.0, "masters": 4.0}}, "O4: masters take"),
        ("O2", {"memory": {"weights": 4.0, "masters": 4.0}}, "O2: weights take"),
    ],
)
def test_bad_results_are_found(level: str, change: dict[str, Any], expected: str) -> None:
    bad = document()
    next(row for row in bad["levels"] if row["level"] == level).update(change)
    found = problems_of(bad, 2)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_missing_level_is_found() -> None:
    bad = document()
    del bad["levels"][3]
    assert len(problems_of(bad, 2)) == 1


@pytest.mark.parametrize(
    ("level", "change"),
    [("O3", {"status": "diverged"}), ("O2", {"steps_skipped": 1, "held_out_ratio": 1.1})],
)
def test_what_may_happen_passes(level: str, change: dict[str, Any]) -> None:
    results = document()
    next(row for row in results["levels"] if row["level"] == level).update(change)
    assert problems_of(results, 2) == []
