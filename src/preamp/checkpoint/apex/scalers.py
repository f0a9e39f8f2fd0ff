# SPDX-License-Identifier: BSD-3-Clause
"""The states of Apex's loss scalers as plain data."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from preamp.checkpoint.apex.reader import ApexRecord
from preamp.core.errors import bad_value


class ScalerState(TypedDict):
    """Everything that a loss scaler goes on from.

    Attributes:
        dynamic: Whether the scale reacts to overflows.
        loss_scale: The scale.
        unskipped: Clean updates since the last overflow or growth.
        scale_factor: Growth and, inverted, backoff.
        scale_window: Clean updates before growth.
        min_loss_scale: Floor, or ``None``.
        max_loss_scale: Ceiling; infinite for none.
    """

    dynamic: bool
    loss_scale: float
    unskipped: int
    scale_factor: float
    scale_window: int
    min_loss_scale: float | None
    max_loss_scale: float


def plain_loss_scaler(source: object) -> ScalerState:
    """Return the state of a loss scaler as plain data.

    Args:
        source: A mapping in this very form; a record from `read_apex_checkpoint`; or the live
            object of Apex, if the caller chose to unpickle it. Understood are
            ``apex.amp.scaler.LossScaler`` and both scalers of ``apex.fp16_utils``.

    Raises:
        ValueError: ``source`` is none of these, or a number in it is not usable.
    """
    try:  # numbers may be tensors, which raise RuntimeError where they hold no number
        if isinstance(source, Mapping):
            state = _from_mapping(cast("Mapping[str, Any]", source))
        elif isinstance(source, ApexRecord):
            state = _from_apex(source.attributes)
        else:
            state = _from_apex(vars(source))
        _check(state)
        return state
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise bad_value(
            f"A loss scaler's state {_shown(cast('Any', source))} cannot be read ({error!r})",
            f"Needed are {', '.join(ScalerState.__annotations__)}, or the attributes of one "
            "of Apex's loss scalers",
            "Pass what state_dict() returned, or what read_apex_checkpoint() read",
        ) from error


def _state(
    dynamic: Any,
    scale: Any,
    unskipped: Any,
    *,
    factor: Any = 2.0,
    window: Any = 1000,
    floor: Any = None,
    ceiling: Any = math.inf,
) -> ScalerState:
    return ScalerState(
        dynamic=bool(dynamic),
        loss_scale=float(scale),
        unskipped=int(unskipped),
        scale_factor=float(factor),
        scale_window=int(window),
        min_loss_scale=None if floor is None else float(floor),
        max_loss_scale=float(ceiling),
    )


def _from_mapping(source: Mapping[str, Any]) -> ScalerState:
    dynamic, scale, unskipped, *others = (source[name] for name in ScalerState.__annotations__)
    names = ("factor", "window", "floor", "ceiling")
    return _state(dynamic, scale, unskipped, **dict(zip(names, others, strict=True)))


def _from_apex(found: Mapping[str, Any]) -> ScalerState:
    if "_loss_scale" in found:  # apex.amp.scaler.LossScaler, whose factor was always 2
        return _state(
            found["dynamic"],
            found["_loss_scale"],
            found["_unskipped"],
            window=found.get("_scale_seq_len", 2000),
            floor=found.get("_min_loss_scale") or None,  # files from before June 2019 have none
            ceiling=found.get("_max_loss_scale", 2.0**24),
        )
    if "cur_iter" not in found:  # apex.fp16_utils.LossScaler
        return _state(False, found["cur_scale"], 0)
    window = int(found["scale_window"])
    # Growth came whenever the distance from the last overflow was a multiple of the window.
    clean = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    unskipped = clean % window if window > 0 else 0
    factor = found["scale_factor"]
    return _state(True, found["cur_scale"], unskipped, factor=factor, window=window, floor=1.0)


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
