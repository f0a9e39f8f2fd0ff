# SPDX-License-Identifier: BSD-3-Clause
"""What ``preamp run`` was asked to record, whatever the program says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from preamp.core.log import say
from preamp.engine.engine import engines_in_use
from preamp.engine.recording import make_recording

_ASKED: dict[str, Any] = {}
"""Arguments of `initialize`, of this process."""


def ask(**arguments: Any) -> None:
    """Have all engines of this process made with this ``history`` or ``numerics``.

    Raises `TypeError` or `ValueError` as `initialize` does for them, and nothing is asked.
    """
    made = make_recording(0, arguments.get("numerics", "off"), 100, arguments.get("history"))
    if made.path is not None:
        arguments["history"] = made.path.absolute()  # the program may change its folder
    _ASKED.update(arguments)


def asked() -> dict[str, Any]:
    """Return what was asked.

    Where an engine writes to the history already, a number is added: ``run-2.jsonl``.
    """
    if "history" not in _ASKED:
        return dict(_ASKED)
    path = _not_in_use(_ASKED["history"])
    say(f"preamp: records go to {path}")
    return {**_ASKED, "history": path}


def _not_in_use(path: Path) -> Path:
    used = {engine.recorder.history.path for engine in engines_in_use() if not engine.closed}
    number, free = 1, path
    while free in used:
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free
