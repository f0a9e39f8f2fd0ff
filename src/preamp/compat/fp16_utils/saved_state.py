# SPDX-License-Identifier: BSD-3-Clause
"""Read and check a saved state before any of it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preamp.checkpoint import ScalerState, plain_loss_scaler
from preamp.compat.fp16_utils.checks import check_mapping, missing_entries, shape_mismatch

KEYS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)

Groups = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A state that fits."""

    scaler: ScalerState
    overflow: bool  # whether the latest gradients overflowed
    first_closure_call: bool  # whether no closure was running
    optimizer: dict[str, Any]
    masters: list[torch.Tensor]  # all masters, in order


def read(state: Mapping[str, Any], own: Groups) -> SavedState:
    """Check a ``state``, of here or of Apex, against the masters of the optimizer it is for."""
    check_mapping(state)
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise missing_entries(missing, list(map(str, state)), "fp16_utils.FP16_Optimizer")
    saved: Groups = state["fp32_from_fp16"]
    masters = [[tuple(master.shape) for master in group] for group in saved]
    wanted = [[tuple(master.shape) for master in group] for group in own]
    if masters != wanted:
        raise shape_mismatch("masters of shapes", masters, wanted)
    return SavedState(
        scaler=plain_loss_scaler(state["loss_scaler"]),
        overflow=bool(state["overflow"]),
        first_closure_call=bool(state["first_closure_call_this_step"]),
        optimizer=state["optimizer_state_dict"],
        masters=[master.detach() for group in saved for master in group],
    )
