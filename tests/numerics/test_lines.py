# SPDX-License-Identifier: BSD-3-Clause
"""Records survive the way through JSON, and what is no record is told."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preamp.numerics import Record, StepRecord, from_json, read_history, to_json

KINDS: tuple[type[Any], ...] = get_args(Record)
records = st.one_of(*(st.from_type(kind) for kind in KINDS))


def same(a: Any, b: Any) -> bool:
    """Equal, nan being itself, and of the same types."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


@given(records)
def test_round_trip(record: Record) -> None:
    line = json.dumps(to_json(record), allow_nan=False)
    assert "\n" not in line
    line.encode("utf-8")
    again = from_json(json.loads(line, parse_constant=pytest.fail))
    assert again is not None
    assert same(record, again)


@given(records)
def test_unknown_fields_and_kinds_are_ignored(record: Record) -> None:
    line = {**to_json(record), "of a newer version": [1]}
    again = from_json(line)
    assert again is not None
    assert same(record, again)
    assert from_json({**line, "kind": "of a newer version"}) is None


STEP = to_json(StepRecord(step=3, losses={0: math.inf}, scales={0: 2.0}, skipped=True))


def test_optional_fields_may_be_missing() -> None:
    line = {key: STEP[key] for key in ("kind", "step", "losses", "scales", "skipped")}
    assert from_json(line) == StepRecord(
        step=3, losses={0: math.inf}, scales={0: 2.0}, skipped=True
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"losses": {"0": "much"}}, "could not convert string to float: 'much'"),
        ({"losses": {"first": 1.0}}, "invalid literal for int"),
        ({"losses": [1.0]}, "'list' object has no attribute"),
        ({"kind": 7}, "it has no kind"),
        (
            {"kind": "numerics"},
            "missing 2 required keyword-only arguments: 'loss_id' and 'tensors'",
        ),
        ({"kind": "numerics", "loss_id": 0, "tensors": [3]}, "'int' object has no attribute"),
    ],
)
def test_what_is_no_record_is_told(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({**STEP, **change}) + "\n")
    with pytest.raises(
        ValueError, match=f"Line 1 of {path} is not a record.*{re.escape(complaint)}"
    ):
        read_history(path)


def test_whole_numbers_are_taken_for_floats() -> None:
    again = from_json({**STEP, "losses": {"0": 3}})
    assert isinstance(again, StepRecord)
    assert same(again.losses, {0: 3.0})
