# SPDX-License-Identifier: BSD-3-Clause
"""The loss scaler of the FP16 optimizers: made from Apex's arguments, saved as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.compat.fp16_utils.scaler_state import ScalerState, scaler_state
from preamp.core.errors import bad_type
from preamp.scaling import DynamicScale, LossScaler, ScaleRule, StaticScale

_DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_factor": 2.0,
    "scale_window": 2000,
    "min_loss_scale": None,
    "max_loss_scale": 2.0**24,
}


def make_scaler(
    static_scale: float, *, dynamic: bool, options: Mapping[str, Any] | None
) -> LossScaler:
    """Make a scaler on the host from Apex's arguments; ``options`` count only if ``dynamic``."""
    given = {**(options or {})} if dynamic else {}
    unknown = sorted(set(given) - set(_DEFAULTS))
    if unknown:
        raise bad_type(
            f"dynamic_loss_args has {', '.join(map(repr, unknown))}",
            f"Known are {', '.join(_DEFAULTS)}",
            "Leave the others out",
        )
    known = {**_DEFAULTS, **given}
    start = known.pop("init_scale")
    known["min_loss_scale"] = known["min_loss_scale"] or None
    scale = start if dynamic else static_scale
    state = scaler_state({**known, "dynamic": dynamic, "loss_scale": scale, "unskipped": 0})
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
