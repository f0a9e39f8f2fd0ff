# SPDX-License-Identifier: BSD-3-Clause
"""Loss scalers: new ones, and to plain data and back; applied only if everything fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from preamp.core.errors import bad_value
from preamp.core.late_numbers import read_numbers

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore

_PREFIX = "loss_scaler"
_OWN_KEYS = ("steps",)


def scalers_state(engine: EngineCore) -> dict[str, Any]:
    """Return Apex's ``{"loss_scaler0": {"loss_scale": …, "unskipped": …}}`` plus ``"steps"``."""
    return read_numbers(late_scalers(engine))


def late_scalers(engine: EngineCore) -> dict[str, Any]:
    """The same with numbers not read from their devices yet."""
    state: dict[str, Any] = OrderedDict(
        (f"{_PREFIX}{index}", scaler.late_state()) for index, scaler in enumerate(engine.scalers)
    )
    state["steps"] = [
        {
            "applied": session.steps_applied,
            "skipped": session.steps_skipped,
            "skips_in_row": session.skips_in_row,
        }
        for session in engine.sessions.values()
    ]
    return state


def read_scalers(engine: EngineCore, state: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Check that ``state`` fits, and return the counters of each optimizer if there are any."""
    wanted = [f"{_PREFIX}{index}" for index in range(len(engine.scalers))]
    missing = [key for key in wanted if key not in state]
    extra = [key for key in state if key not in wanted and key not in _OWN_KEYS]
    if missing or extra:
        raise bad_value(
            f"The state of {len(state)} entries lacks {missing or 'nothing'} and has "
            f"{extra or 'nothing'} beyond them",
            f"Needed are exactly {wanted or 'no entries'}, one for each of num_losses",
            "Call initialize with the num_losses of the run that saved it; nothing was loaded",
        )
    for scaler, key in zip(engine.scalers, wanted, strict=True):
        scaler.read_state(state[key])
    return _read_steps(state.get("steps", ()))


def load_scalers(engine: EngineCore, state: Mapping[str, Any]) -> bool:
    """Set scalers by the number in their key, and the counters; whether there were any."""
    counts = read_scalers(engine, state)
    for index, scaler in enumerate(engine.scalers):
        scaler.load_state_dict(state[f"{_PREFIX}{index}"])
    for session, count in zip(engine.sessions.values(), counts, strict=False):
        session.steps_applied, session.steps_skipped, session.skips_in_row = count
    return bool(counts)


def _read_steps(steps: Any) -> list[tuple[int, int, int]]:
    try:
        return [
            (int(entry["applied"]), int(entry["skipped"]), int(entry["skips_in_row"]))
            for entry in steps
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise bad_value(
            f"The step counters {steps!r} cannot be read",
            "Needed are the numbers 'applied', 'skipped' and 'skips_in_row' of each optimizer",
            "Pass what state_dict() returned; nothing was loaded",
        ) from error
