# SPDX-License-Identifier: BSD-3-Clause
"""The states of loss scalers as plain data: of preamp's own, and of Apex's objects in old files."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from preamp.core.errors import bad_value


class ScalerState(TypedDict):
    """Everything that a loss scaler goes on from."""

    dynamic: bool  # whether the scale reacts to overflows
    loss_scale: float
    unskipped: int  # clean updates since the last overflow or growth
    scale_factor: float  # growth and, inverted, backoff
    scale_window: int  # clean updates before growth
    min_loss_scale: float | None
    max_loss_scale: float  # infinite for none


def scaler_state(source: object) -> ScalerState:
    """Return the state of a loss scaler as plain data.

    Args:
        source: A mapping in this very form, or what unpickling made of
            ``apex.amp.scaler.LossScaler`` or of either scaler of ``apex.fp16_utils``.

    Raises:
        ValueError: ``source`` is none of these, or a number in it is not usable.
    """
    try:  # numbers may be tensors, which raise RuntimeError where they hold no number
        is_plain = isinstance(source, Mapping)
        state = _converted(cast("Any", source) if is_plain else _from_apex(vars(source)))
        _check(state)
        return state
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise bad_value(
            f"A loss scaler's state {_shown(cast('Any', source))} cannot be read ({error!r})",
            f"Needed are {', '.join(ScalerState.__annotations__)}, or the attributes of one "
            "of Apex's loss scalers",
            "Pass what state_dict() returned, or what torch.load() read of a file of Apex",
        ) from error


def _converted(found: Mapping[str, Any]) -> ScalerState:
    floor = found["min_loss_scale"]
    return ScalerState(
        dynamic=bool(found["dynamic"]),
        loss_scale=float(found["loss_scale"]),
        unskipped=int(found["unskipped"]),
        scale_factor=float(found["scale_factor"]),
        scale_window=int(found["scale_window"]),
        min_loss_scale=None if floor is None else float(floor),
        max_loss_scale=float(found["max_loss_scale"]),
    )


def _from_apex(found: Mapping[str, Any]) -> dict[str, Any]:
    if "_loss_scale" in found:  # apex.amp.scaler.LossScaler, whose factor was always 2
        return {
            "dynamic": found["dynamic"],
            "loss_scale": found["_loss_scale"],
            "unskipped": found["_unskipped"],
            "scale_factor": 2.0,
            "scale_window": found.get("_scale_seq_len", 2000),
            # Files from before June 2019 have no limits
            "min_loss_scale": found.get("_min_loss_scale") or None,
            "max_loss_scale": found.get("_max_loss_scale", 2.0**24),
        }
    dynamic = "cur_iter" in found  # else apex.fp16_utils.LossScaler
    window, clean = 1000, 0
    if dynamic:
        window = int(found["scale_window"])
        # Growth came whenever the distance from the last overflow was a multiple of the window.
        clean = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    return {
        "dynamic": dynamic,
        "loss_scale": found["cur_scale"],
        "unskipped": clean % window if window > 0 else 0,
        "scale_factor": found.get("scale_factor", 2.0),
        "scale_window": window,
        "min_loss_scale": 1.0 if dynamic else None,
        "max_loss_scale": math.inf,
    }


def _check(state: ScalerState) -> None:
    floor = state["min_loss_scale"] or 0.0
    usable = {
        "loss_scale": math.isfinite(state["loss_scale"]) and state["loss_scale"] > 0,
        "unskipped": state["unskipped"] >= 0,
        "scale_factor": math.isfinite(state["scale_factor"]) and state["scale_factor"] >= 1,
        "scale_window": state["scale_window"] >= 1,
        "min_loss_scale": math.isfinite(floor) and floor >= 0,
        "max_loss_scale": state["max_loss_scale"] > 0 and state["max_loss_scale"] >= floor,
    }
    wrong = [name for name, is_usable in usable.items() if not is_usable]
    if wrong:
        raise ValueError(f"out of range: {', '.join(wrong)}")


def _shown(source: object) -> str:
    short = reprlib.Repr()  # of what holds itself twice, and so on, repr would never end
    short.maxlevel, short.maxdict, short.maxstring, short.maxother = 3, 20, 200, 200
    return short.repr(dict(cast("Any", source)) if isinstance(source, Mapping) else source)
