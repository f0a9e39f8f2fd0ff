# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint has of an engine between two steps, as plain data, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.engine.engine import Engine
from preamp.engine.state import late_scalers, read_scalers


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return everything but weights and optimizers' state.

    Waits for steps whose outcome is not known yet, and once for all numbers.
    """
    engine.ledger.settle(wait=True)
    # Overflows that scales have yet to react to, after `delay_overflow_check`
    flags = [LateNumber(float, scaler.found_inf) for scaler in engine.scalers]
    return {
        **read_numbers({"scalers": late_scalers(engine), "found_inf": flags}),
        "last_skipped": engine.ledger.last_skipped,
        # A census takes the norm along where the step before was clipped
        "clips": [session.clips or session.has_clipped for session in engine.sessions.values()],
    }


def prepare_engine(engine: Engine, state: Mapping[str, Any]) -> Callable[[], None]:
    """Read an `engine_state`, and return what applies it; nothing changes before.

    Raises ``KeyError`` or ``TypeError`` for a ``state`` of another form, and ``ValueError`` for one
    of another number of losses.
    """
    read_scalers(engine, state["scalers"])
    flags = [
        torch.tensor(number, dtype=torch.float32, device=scaler.device)
        for number, scaler in zip(_numbers(state["found_inf"]), engine.scalers, strict=True)
    ]
    last_skipped = bool(state["last_skipped"])
    clips = list(map(bool, _numbers(state["clips"])))
    if len(clips) != len(engine.sessions):
        raise TypeError(f"there are {len(clips)} optimizers")

    def apply() -> None:
        engine.load_state_dict(state["scalers"])
        for scaler, flag in zip(engine.scalers, flags, strict=True):
            scaler.record(flag, forgets=True)
        engine.ledger.last_skipped = last_skipped
        for session, has_clipped in zip(engine.sessions.values(), clips, strict=True):
            session.norm = None
            session.clips, session.has_clipped = False, has_clipped

    return apply


def _numbers(values: Sequence[Any]) -> list[float]:
    """Flags as they were saved."""
    for value in values:
        if not isinstance(value, (bool, int, float)) or not 0 <= value < 2**31:
            raise TypeError(f"{value!r} is no flag")
    return list(map(float, values))


def drop_gradients(engine: Engine) -> None:
    """Be between two steps, without gradients and without anything known of earlier ones."""
    for session in engine.sessions.values():
        session.begin_anew()
    engine.late_scalers.clear()
