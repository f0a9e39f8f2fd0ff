# SPDX-License-Identifier: BSD-3-Clause
"""The loss scaler of the FP16 optimizers: made from Apex's arguments, saved as plain data.

Files of Apex have its scaler objects, whose attributes are understood as well.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from preamp.core.errors import bad_type, bad_value
from preamp.scaling import DynamicScale, LossScaler, ScaleRule, StaticScale


class ScalerState(TypedDict):
    """Everything that a loss scaler goes on from."""

    dynamic: bool  # whether the scale reacts to overflows
    loss_scale: float
    unskipped: int  # clean updates since the last overflow or growth
    scale_factor: float  # growth and, inverted, backoff
    scale_window: int  # clean updates before growth
    min_loss_scale: float | None
    max_loss_scale: float  # infinite for none


_OPTIONS = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")


def make_scaler(
    static_scale: float, *, dynamic: bool, options: Mapping[str, Any] | None
) -> LossScaler:
    """Make a scaler on the host from Apex's arguments; ``options`` count only if ``dynamic``."""
    given = {**(options or {})} if dynamic else {"init_scale": static_scale}
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise bad_type(
            f"dynamic_loss_args has {', '.join(map(repr, unknown))}",
            f"Known are {', '.join(_OPTIONS)}",
            "Leave the others out",
        )
    usual = {**state_of(LossScaler(DynamicScale())), "dynamic": dynamic}
    try:
        state = scaler_state({**usual, **given, "loss_scale": given.get("init_scale", 2.0**16)})
    except ValueError as error:
        raise bad_value(
            f"Got {given if dynamic else {'static_loss_scale': static_scale}}",
            "Scales and the window are finite numbers above 0, scale_factor is 1 or more, and "
            "min_loss_scale is at most max_loss_scale",
            "For a scale that finds itself pass dynamic_loss_scale=True alone",
        ) from error
    if dynamic:
        state["loss_scale"] = min(state["loss_scale"], state["max_loss_scale"])
    return scaler_from(state)


def scaler_from(state: ScalerState) -> LossScaler:
    """Make a scaler that goes on from ``state``."""
    rule: ScaleRule = StaticScale(init_scale=state["loss_scale"])
    if state["dynamic"]:
        rule = DynamicScale(
            init_scale=state["loss_scale"],
            growth_factor=state["scale_factor"],
            backoff_factor=1.0 / state["scale_factor"],
            growth_interval=state["scale_window"],
            min_scale=state["min_loss_scale"],
            max_scale=state["max_loss_scale"],
        )
    scaler = LossScaler(rule)
    scaler.load_state_dict({"loss_scale": state["loss_scale"], "unskipped": state["unskipped"]})
    return scaler


def set_scale(scaler: LossScaler, value: float) -> None:
    """Set the scale by hand, to a finite number above 0."""
    scaler.set_scale(scaler_state({**state_of(scaler), "loss_scale": value})["loss_scale"])


def state_of(scaler: LossScaler) -> ScalerState:
    """Return everything `scaler_from` needs."""
    rule, now = scaler.rule, scaler.state_dict()
    limits = rule if isinstance(rule, DynamicScale) else DynamicScale()
    return ScalerState(
        dynamic=scaler.is_dynamic,
        loss_scale=now["loss_scale"],
        unskipped=int(now["unskipped"]),
        scale_factor=limits.growth_factor,
        scale_window=limits.growth_interval,
        min_loss_scale=limits.min_scale,
        max_loss_scale=limits.max_scale,
    )


def scaler_state(source: object) -> ScalerState:
    """Return the state of a loss scaler as plain data.

    Args:
        source: A mapping in this very form, or what unpickling made of
            ``apex.amp.scaler.LossScaler`` or of either scaler of ``apex.fp16_utils``.

    Raises:
        ValueError: ``source`` is none of these, or a number in it is not usable.
    """
    try:  # numbers may be tensors, which raise RuntimeError where they hold no number
        found = cast("Any", source) if isinstance(source, Mapping) else _from_apex(vars(source))
        state = ScalerState(
            dynamic=bool(found["dynamic"]),
            loss_scale=float(found["loss_scale"]),
            unskipped=int(found["unskipped"]),
            scale_factor=float(found["scale_factor"]),
            scale_window=int(found["scale_window"]),
            min_loss_scale=float(found["min_loss_scale"] or 0) or None,
            max_loss_scale=float(found["max_loss_scale"]),
        )
        _check(state)
        return state
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise bad_value(
            f"A loss scaler's state {reprlib.repr(cast('Any', source))} cannot be read ({error!r})",
            f"Needed are {', '.join(ScalerState.__annotations__)}, or the attributes of one "
            "of Apex's loss scalers",
            "Pass what state_dict() returned, or what torch.load() read of a file of Apex",
        ) from error


def _from_apex(found: Mapping[str, Any]) -> dict[str, Any]:
    if "_loss_scale" in found:  # apex.amp.scaler.LossScaler, whose factor was always 2
        return {
            "dynamic": found["dynamic"],
            "loss_scale": found["_loss_scale"],
            "unskipped": found["_unskipped"],
            "scale_factor": 2.0,
            "scale_window": found.get("_scale_seq_len", 2000),
            # Files from before June 2019 have no limits
            "min_loss_scale": found.get("_min_loss_scale"),
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
