# SPDX-License-Identifier: BSD-3-Clause
"""Records survive the way through JSON, and what is no record is told."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preamp.numerics import Record, StepRecord, TensorStatistics, from_json, to_json
from preamp.numerics.records import to_line

# What a float64 can have: others are refused.
st.register_type_strategy(
    TensorStatistics,
    st.builds(
        TensorStatistics,
        scale=st.floats(min_value=0, exclude_min=True),
        histogram=st.none() | st.dictionaries(st.integers(-1074, 1023), st.integers()),
    ),
)
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
    line = to_line(record)
    assert line.count("\n") == 1
    assert line.endswith("\n")
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
        ({"step": "3"}, "step: '3' is not of the type int"),
        ({"step": True}, "step: True is not of the type int"),
        ({"step": 3.5}, "step: 3.5 is not of the type int"),
        ({"losses": {"0": "much"}}, "losses: 'much' is not a number"),
        ({"losses": {"first": 1.0}}, "losses: invalid literal"),
        ({"losses": [1.0]}, "losses: [1.0] is not an object"),
        ({"norm": False}, "norm: False is not a number"),
        ({"skipped": 1}, "skipped: 1 is not of the type bool"),
        ({"kind": 7}, "it has no kind"),
        ({"kind": "numerics", "loss_id": 0, "tensors": {}}, "tensors: {} is not a list"),
        ({"kind": "numerics", "loss_id": 0, "tensors": [3]}, "tensors: 3 is not an object"),
    ],
)
def test_values_of_the_wrong_type(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        from_json({**STEP, **change})


@pytest.mark.parametrize("name", ["step", "losses", "skipped"])
def test_missing_fields(name: str) -> None:
    line = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(ValueError, match=f"a field is missing: .*'{name}'"):
        from_json(line)


def test_whole_numbers_are_taken_for_floats() -> None:
    again = from_json({**STEP, "losses": {"0": 3}})
    assert isinstance(again, StepRecord)
    assert same(again.losses, {0: 3.0})
