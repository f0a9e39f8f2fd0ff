# SPDX-License-Identifier: BSD-3-Clause
"""A loss scaler's state as plain data, from any of the forms that Apex saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from preamp.checkpoint.reader import ApexRecord
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


def _from_mapping(source: Mapping[str, Any]) -> ScalerState:
    floor = source["min_loss_scale"]
    return ScalerState(
        dynamic=bool(source["dynamic"]),
        loss_scale=float(source["loss_scale"]),
        unskipped=int(source["unskipped"]),
        scale_factor=float(source["scale_factor"]),
        scale_window=int(source["scale_window"]),
        min_loss_scale=None if floor is None else float(floor),
        max_loss_scale=float(source["max_loss_scale"]),
    )


def _from_apex(found: Mapping[str, Any]) -> ScalerState:
    if "_loss_scale" in found:  # apex.amp.scaler.LossScaler, whose factor was always 2
        floor = found.get("_min_loss_scale")  # files from before June 2019 have no limits
        return ScalerState(
            dynamic=bool(found["dynamic"]),
            loss_scale=float(found["_loss_scale"]),
            unskipped=int(found["_unskipped"]),
            scale_factor=2.0,
            scale_window=int(found.get("_scale_seq_len", 2000)),
            min_loss_scale=float(floor) if floor else None,
            max_loss_scale=float(found.get("_max_loss_scale", 2.0**24)),
        )
    if "cur_iter" not in found:  # apex.fp16_utils.LossScaler
        return ScalerState(
            dynamic=False,
            loss_scale=float(found["cur_scale"]),
            unskipped=0,
            scale_factor=2.0,
            scale_window=1000,
            min_loss_scale=None,
            max_loss_scale=math.inf,
        )
    window = int(found["scale_window"])
    # Growth came whenever the distance from the last overflow was a multiple of the window.
    clean = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    return ScalerState(
        dynamic=True,
        loss_scale=float(found["cur_scale"]),
        unskipped=clean % window if window > 0 else 0,
        scale_factor=float(found["scale_factor"]),
        scale_window=window,
        min_loss_scale=1.0,
        max_loss_scale=math.inf,
    )


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
    return repr(dict(cast("Any", source))) if isinstance(source, Mapping) else repr(source)
