# SPDX-License-Identifier: BSD-3-Clause
"""What is recorded and watched as a file says, with no change of the script: ``PREAMP_INSIGHT``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast, get_args

from preamp.core.errors import bad_value, unavailable
from preamp.core.log import say
from preamp.engine.engine import Engine, engines_in_use
from preamp.engine.recording import Recording

VARIABLE: Final = "PREAMP_INSIGHT"
"""The environment variable with the path of the file."""

_ARGUMENTS = ("history", "numerics", "numerics_every", "overflow", "verbosity")
_ACTIVATIONS = ("kinds", "pattern", "steps")
_FRAMES = ("pattern", "steps")
_RANGE = ("start", "stop", "step")


@dataclass(frozen=True, slots=True)
class Insight:
    """What a file asks for; nothing where there is none."""

    path: Path | None = None
    # Arguments of `initialize`, in place of the script's
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Of `Engine.watch_activations`, for each call
    activations: Sequence[Mapping[str, Any]] = ()
    frames: Sequence[Mapping[str, Any]] = ()  # of `Engine.watch_frames`, one or none

    def check(self, recording: Recording) -> None:
        """Raise `ValueError` for activations or frames that would be recorded nowhere."""
        if recording.takes_steps or self.path is None:
            return
        for name in ("activations", "frames"):
            if getattr(self, name):
                raise _not_allowed(self.path, f"{name} alone", f"{name} beside history or numerics")

    def apply(self, engine: Engine) -> None:
        """Watch the modules that are named, and say what is done."""
        if self.path is None:
            return
        asked = [f"{name}={str(value)!r}" for name, value in self.arguments.items()]
        for name, watch, tables in (
            ("activations", engine.watch_activations, self.activations),
            ("frames", engine.watch_frames, self.frames),
        ):
            for options in tables:
                try:
                    watch(**options)
                    asked.append(f"{name} of {options['pattern']!r}")
                except ValueError as error:  # there may be models that this is not meant for
                    asked.append(str(error))
        say(f"preamp: as {self.path} says: {', '.join(asked) or 'nothing'}")


def read_insight() -> Insight:
    """Read the file that `VARIABLE` names.

    Its ``history`` is relative to the file's folder. Where an engine of this process writes to that
    path already, as with several engines, a number is added: ``run-2.jsonl``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no TOML, or says something else than what is allowed.
        PreampUnavailableError: Python is older than 3.11 and tomli is not installed.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return Insight()
    path = Path(name)
    given = _parsed(path)
    tables, frames = given.pop("activations", []), given.pop("frames", None)
    _check_names(path, given, _ARGUMENTS)
    if not isinstance(tables, list):
        raise _not_allowed(path, f"activations = {tables!r}", "[[activations]] tables")
    activations = [_options_in(path, table, _ACTIVATIONS) for table in cast("list[Any]", tables)]
    framed = [] if frames is None else [_options_in(path, frames, _FRAMES)]
    if framed and "steps" not in framed[0]:
        raise _not_allowed(path, "frames without steps", "[frames] with steps = [10, 11]")
    if "history" in given:
        given["history"] = _not_in_use(path.parent / str(given["history"]))
    return Insight(path, given, activations, framed)


def _parsed(path: Path) -> dict[str, Any]:
    toml: Any = None
    for name in ("tomllib", "tomli"):
        try:
            toml = importlib.import_module(name)
            break
        except ImportError:
            continue
    if toml is None:
        raise unavailable(
            f"{VARIABLE} is set, but nothing here reads TOML",
            "Python 3.11 and newer does, or the package tomli",
            "pip install tomli",
        )
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_allowed(path, f"what is no TOML ({error})", "TOML") from error


def _options_in(path: Path, table: Any, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        name, written = "activations", "[[activations]] tables"
        if allowed is _FRAMES:
            name, written = "frames", "a [frames] table"
        raise _not_allowed(path, f"{table!r} in {name}", written)
    from preamp.numerics.records import OfModules

    options = cast("dict[str, Any]", table)
    _check_names(path, options, allowed)
    kinds: Any = options.get("kinds", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    unknown = [kind for kind in kinds if kind not in get_args(OfModules)]
    if unknown:
        raise _not_allowed(path, f"kinds = {unknown}", ", ".join(map(repr, get_args(OfModules))))
    steps = options.get("steps")
    if isinstance(steps, dict):
        numbers = cast("dict[str, Any]", steps)
        _check_names(path, numbers, _RANGE)
        if not all(type(number) is int for number in numbers.values()) or "stop" not in numbers:
            raise _not_allowed(path, f"steps = {steps!r}", "whole numbers, stop among them")
        options = options | {
            "steps": range(numbers.get("start", 1), numbers["stop"], numbers.get("step", 1))
        }
    elif "steps" in options and not (
        isinstance(steps, list) and all(type(step) is int for step in cast("list[Any]", steps))
    ):
        raise _not_allowed(path, f"steps = {steps!r}", "a list of whole numbers, or a range")
    return {"pattern": "*"} | options


def _check_names(path: Path, given: Iterable[str], allowed: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise _not_allowed(path, ", ".join(map(repr, unknown)), ", ".join(allowed))


def _not_in_use(path: Path) -> Path:
    used = {engine.recorder.history.path for engine in engines_in_use() if not engine.closed}
    number, free = 1, path
    while free in used:
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _not_allowed(path: Path, got: str, allowed: str) -> ValueError:
    return bad_value(
        f"{path}, which {VARIABLE} names, has {got}",
        f"Allowed is {allowed}",
        "Correct the file, or unset the variable",
    )
