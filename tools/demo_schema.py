# SPDX-License-Identifier: BSD-3-Clause
"""A reader of ``results.json`` that refuses all but what the demo's records say is in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from preamp.core.errors import message
from preamp.demo.parallel import RankResult
from preamp.demo.records import COMPARED, DERIVED, SCHEMA_VERSION, DemoResult, LevelResult, Memory

_MEASURED = (LevelResult, RankResult)
"""Their numbers are measured, and null where they were not finite."""

_MORE: Mapping[type, dict[str, Any]] = {
    DemoResult: {"schema_version": int},
    LevelResult: dict.fromkeys((*DERIVED, *COMPARED), float | None),
    Memory: {"total": float},
}
"""What the file has besides the fields."""

_LEFT_OUT = {LevelResult: {"records"}}


def read_results(path: Path) -> dict[str, Any]:
    """Read a ``results.json`` and check every field of it; raises as `check_results` does."""
    document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    check_results(document)
    return document


def check_results(document: Any) -> None:
    """Check data against this schema version.

    Args:
        document: What ``json.loads`` returned.

    Raises:
        ValueError: Something is missing, superfluous or of another type; the message says where.
    """
    _check(document, DemoResult, "results")
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            message(
                f"Found schema version {document['schema_version']}",
                f"This preamp reads version {SCHEMA_VERSION}",
                "Run the demo again",
            )
        )


def _check(value: Any, kind: Any, where: str) -> None:
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        _check_record(value, kind, where)
    elif origin in (Union, UnionType):
        (present,) = (part for part in parts if part is not NoneType)
        if value is not None:
            _check(value, present, where)
    elif origin is tuple:
        _require(isinstance(value, list), where, "a list", value)
        for index, item in enumerate(value):
            _check(item, parts[0], f"{where}[{index}]")
    elif origin is dict:
        _require(isinstance(value, dict), where, "an object", value)
        for key, item in value.items():
            _check(item, parts[1], f"{where}.{key}")
    elif origin is Literal:
        _require(value in parts, where, f"one of {', '.join(parts)}", value)
    else:
        # bool is an int to Python, not to a reader of the file.
        right = isinstance(value, (int, float) if kind is float else kind)
        right &= kind is bool or not isinstance(value, bool)
        _require(right, where, kind.__name__, value)


def _check_record(value: Any, kind: Any, where: str) -> None:
    hints = get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    fields = {name: hints[name] for name in names if name not in _LEFT_OUT.get(kind, ())}
    fields |= _MORE.get(kind, {})
    if kind in _MEASURED:
        wide = {float: float | None, tuple[float, ...]: tuple[float | None, ...]}
        fields = {name: wide.get(hint, hint) for name, hint in fields.items()}
    _require(isinstance(value, dict), where, "an object", value)
    _require(value.keys() == fields.keys(), where, f"the keys {sorted(fields)}", sorted(value))
    for name, hint in fields.items():
        _check(value[name], hint, f"{where}.{name}")


def _require(holds: bool, where: str, allowed: str, got: Any) -> None:
    if not holds:
        raise ValueError(
            message(f"Found {got!r} at {where}", f"It has to be {allowed}", "Run the demo again")
        )
