# SPDX-License-Identifier: BSD-3-Clause
"""Records as lines of JSON, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from preamp.numerics.records import (
    CastRecord,
    CastsRecord,
    MemoryRecord,
    NumericsRecord,
    OverflowRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TensorStatistics,
    TraceRecord,
)

_KINDS: dict[str, type[Any]] = {
    record.kind: record
    for record in (
        RunRecord,
        ResumeRecord,
        StepRecord,
        OverflowRecord,
        NumericsRecord,
        CastsRecord,
        MemoryRecord,
    )
}
_PARTS: dict[tuple[str, str], type[Any]] = {
    ("overflow", "trace"): TraceRecord,
    ("numerics", "tensors"): TensorStatistics,
    ("casts", "casts"): CastRecord,
}
_INT_KEYS = {("step", "losses"), ("step", "scales"), ("", "histogram")}
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(record: Record) -> dict[str, Any]:
    """Return ``record`` as what ``json.dumps(..., allow_nan=False)`` accepts."""
    return {"kind": record.kind, **_plain(dataclasses.asdict(record))}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def from_json(line: Mapping[str, Any]) -> Record | None:
    """Return the record of one line, or ``None`` if its kind is unknown.

    Raises:
        ValueError: A field is missing.
    """
    kind = line.get("kind")
    record = _KINDS.get(str(kind))
    return None if record is None else _build(record, line, str(kind))


def _build(record: type[Any], line: Mapping[str, Any], kind: str) -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if field.name in line:
            values[field.name] = _field(kind, field.name, line[field.name], field.type)
    try:
        return record(**values)
    except TypeError as error:
        raise ValueError(f"a line of kind {kind!r} lacks a field: {error}") from error


def _field(kind: str, name: str, value: Any, annotation: Any) -> Any:
    part = _PARTS.get((kind, name))
    if part is not None and isinstance(value, list):
        return [_build(part, item, "") for item in cast("list[Any]", value)]
    if part is not None and isinstance(value, dict):
        return _build(part, cast("dict[str, Any]", value), "")
    return _revive(value, int_keys=(kind, name) in _INT_KEYS, words="float" in str(annotation))


def _revive(value: Any, *, int_keys: bool, words: bool) -> Any:
    if words and isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_revive(item, int_keys=False, words=words) for item in items]
    if isinstance(value, dict):
        return {
            (int(key) if int_keys else key): _revive(item, int_keys=False, words=words)
            for key, item in cast("dict[str, Any]", value).items()
        }
    return value
