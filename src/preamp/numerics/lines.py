# SPDX-License-Identifier: BSD-3-Clause
"""Records as lines of JSON, and back. The annotations of the records say what a line may hold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from preamp.core.pytree import plain
from preamp.numerics.records import Record

_KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in get_args(Record)}
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(record: Record) -> dict[str, Any]:
    """Return ``record`` as what ``json.dumps(..., allow_nan=False)`` accepts."""
    return {"kind": record.kind, **plain(record)}


def to_line(record: Record) -> str:
    """Return ``record`` as a line, the end of the line included."""
    return json.dumps(to_json(record), allow_nan=False) + "\n"


def from_json(line: Mapping[str, Any]) -> Record | None:
    """Return the record of one line, or ``None`` if its kind is unknown.

    Raises:
        ValueError: It has no kind, or a field is missing or of the wrong type.
    """
    kind = line.get("kind")
    if not isinstance(kind, str):
        raise ValueError("it has no kind")
    record = _KINDS.get(kind)
    return None if record is None else _reader(record)(line)


Reader = Callable[[Any], Any]


@cache
def _reader(hint: Any) -> Reader:
    """What turns a value of a line into one of the type ``hint``."""
    if dataclasses.is_dataclass(hint):
        return partial(_read_fields, cast("type[Any]", hint))
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):  # with None: there are no others
        return partial(_read_optional, _reader(inner[0]))
    if origin is list:
        return partial(_read_list, _reader(inner[0]))
    if origin is dict:
        return partial(_read_dict, inner[0], _reader(inner[1]))
    if origin is Literal:  # newer versions may know more words
        return partial(_read_plain, str)
    return _read_float if hint is float else partial(_read_plain, hint)


@cache
def _field_readers(kind: type[Any]) -> dict[str, Reader]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


def _read_fields(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not an object")
    entries = cast("Mapping[str, Any]", value)
    values: dict[str, Any] = {}
    for name, read in _field_readers(kind).items():
        if name in entries:
            try:
                values[name] = read(entries[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"a field is missing: {error}") from error


def _read_optional(read: Reader, value: Any) -> Any:
    return None if value is None else read(value)


def _read_list(read: Reader, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return [read(item) for item in cast("list[Any]", value)]


def _read_dict(key: type[Any], read: Reader, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not an object")
    return {key(name): read(item) for name, item in cast("Mapping[Any, Any]", value).items()}


def _read_float(value: Any) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def _read_plain(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of the type {kind.__name__}")
    return value
