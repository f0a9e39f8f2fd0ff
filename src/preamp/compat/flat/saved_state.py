# SPDX-License-Identifier: BSD-3-Clause
"""Read and check a saved state of the flat FP16_Optimizer before any of it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preamp.compat.flat.refusals import is_usable
from preamp.compat.fp16_utils.checks import check_mapping, missing_entries, shape_mismatch
from preamp.core.errors import bad_value

KEYS = ("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups_flat")
DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A state that fits."""

    fields: dict[str, Any]  # the optimizer's attributes by name
    optimizer: dict[str, Any]
    masters: list[torch.Tensor]  # one for each group


def read(state: Mapping[str, Any], own: Sequence[torch.Tensor]) -> SavedState:
    """Check a ``state``, of here or of Apex, against the masters of the optimizer it is for."""
    check_mapping(state)
    needed = (*KEYS, *(DYNAMIC_KEYS if state.get("dynamic_loss_scale") else ()))
    missing = [key for key in needed if key not in state]
    if missing:
        raise missing_entries(missing, list(map(str, state)), "the flat FP16_Optimizer")
    masters: list[torch.Tensor] = [master.detach() for master in state["fp32_groups_flat"]]
    if [master.shape for master in masters] != [master.shape for master in own]:
        saved = [master.numel() for master in masters]
        raise shape_mismatch("flat masters of sizes", saved, [master.numel() for master in own])
    fields = {key: state[key] for key in needed[:3] + needed[len(KEYS) :]}
    _check_numbers(fields)
    return SavedState(fields=fields, optimizer=state["optimizer_state_dict"], masters=masters)


def _check_numbers(fields: Mapping[str, Any]) -> None:
    for key in ("cur_scale", "scale_factor", "scale_window"):
        if key in fields and not (_is_number(fields[key]) and is_usable(fields[key])):
            what = "A loss scale" if key == "cur_scale" else f"A {key}"
            raise _unusable(key, fields[key], f"{what} is a number above 0")
    for key in ("cur_iter", "last_overflow_iter"):
        if key in fields and not _is_number(fields[key]):
            raise _unusable(key, fields[key], "Steps are counted in whole numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _unusable(key: str, value: object, allowed: str) -> ValueError:
    return bad_value(
        f"The state has {key}={value!r}",
        allowed,
        "Pass what state_dict() returned; nothing was loaded",
    )
