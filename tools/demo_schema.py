# SPDX-License-Identifier: BSD-3-Clause
"""What ``results.json`` contains, and a reader that refuses anything else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from preamp.core.errors import message
from preamp.demo.records import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class _Optional:
    """An object with these keys, or null."""

    keys: dict[str, Any]


_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))

_MODEL = {"layers": int, "width": int, "heads": int, "context": int}
_OPTIMIZER = {
    "learning_rate": _NUMBER,
    "final_fraction": _NUMBER,
    "warmup_fraction": _NUMBER,
    "betas": [_NUMBER],
    "eps": _NUMBER,
    "weight_decay": _NUMBER,
    "max_norm": _NUMBER,
}
_CONFIG = {
    "levels": [str],
    "steps": int,
    "batch": int,
    "seed": int,
    "device": str,
    "held_out_windows": int,
    "storage": str,
    "parallel": str,
    "ranks": int,
    "model": _MODEL,
    "optimizer": _OPTIMIZER,
}
_MEMORY = {
    "weights": _NUMBER,
    "masters": _NUMBER,
    "gradients": _NUMBER,
    "optimizer_state": _NUMBER,
    "total": _NUMBER,
}
_RANK = {
    "rank": int,
    "steps_skipped": int,
    "loss_scale": _OPTIONAL_NUMBER,
    "losses": str,
    "weights": str,
    "median_seconds": _OPTIONAL_NUMBER,
    "bytes_per_parameter": _OPTIONAL_NUMBER,
    "peak_bytes": _OPTIONAL_NUMBER,
}
_LEVEL = {
    "level": str,
    "status": str,
    "reason": str,
    "steps_done": int,
    "steps_skipped": int,
    "loss_scale": _OPTIONAL_NUMBER,
    "losses": [_OPTIONAL_NUMBER],
    "step_seconds": [_NUMBER],
    "warmup_steps": int,
    "tokens_per_step": int,
    "held_out_bits": _OPTIONAL_NUMBER,
    "dtypes": _Optional({"weights": str, "compute": str, "masters": str}),
    "memory": _Optional(_MEMORY),
    "activation_bytes": _OPTIONAL_NUMBER,
    "peak_bytes": _OPTIONAL_NUMBER,
    "ranks": [_RANK],
    "best_seconds": _OPTIONAL_NUMBER,
    "median_seconds": _OPTIONAL_NUMBER,
    "tokens_per_second": _OPTIONAL_NUMBER,
    "best_ratio": _OPTIONAL_NUMBER,
    "median_ratio": _OPTIONAL_NUMBER,
    "held_out_ratio": _OPTIONAL_NUMBER,
}
_DOCUMENT = {
    "schema_version": int,
    "config": _CONFIG,
    "versions": {"python": str, "torch": str, "preamp": str},
    "device": str,
    "parameters": int,
    "train_bytes": int,
    "held_out_bytes": int,
    "interrupted": bool,
    "levels": [_LEVEL],
}


def read_results(path: Path) -> dict[str, Any]:
    """Read a ``results.json`` and check every field of it.

    Raises:
        ValueError: Something is missing, superfluous or of another type; the message says where.
    """
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
    _check(document, _DOCUMENT, "results")
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            message(
                f"Found schema version {document['schema_version']}",
                f"This preamp reads version {SCHEMA_VERSION}",
                "Run the demo again",
            )
        )


def _check(value: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        _check_keys(value, cast("dict[str, Any]", expected), where)
    elif isinstance(expected, list):
        _require(isinstance(value, list), where, "a list", value)
        for index, item in enumerate(value):
            _check(item, expected[0], f"{where}[{index}]")
    elif isinstance(expected, _Optional):
        if value is not None:
            _check_keys(value, expected.keys, where)
    else:
        # bool is an int to Python, not to a reader of the file.
        right = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
        _require(right, where, _spell(expected), value)


def _check_keys(value: Any, expected: dict[str, Any], where: str) -> None:
    _require(isinstance(value, dict), where, "an object", value)
    _require(value.keys() == expected.keys(), where, f"the keys {sorted(expected)}", sorted(value))
    for key, item in expected.items():
        _check(value[key], item, f"{where}.{key}")


def _require(holds: bool, where: str, allowed: str, got: Any) -> None:
    if not holds:
        raise ValueError(
            message(f"Found {got!r} at {where}", f"It has to be {allowed}", "Run the demo again")
        )


def _spell(expected: type | tuple[type, ...]) -> str:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
