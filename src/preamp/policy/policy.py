# SPDX-License-Identifier: BSD-3-Clause
"""The frozen record of everything ``initialize`` decides about precision."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from preamp.policy.keep import NOTHING, KeepFP32, parse_keep
from preamp.policy.storage import FULL, Storage, parse_storage

Scope = Literal["thread", "model"]
OnOverflow = Literal["skip", "trace"]

APEX_OPTIONS = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
"""The fields that Apex had, in the order it printed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One engine's decisions; the rows of ``OPT_LEVELS`` are the defaults.

    Attributes:
        opt_level: ``"O0"`` to ``"O5"``.
        brief: One sentence that names the level.
        enabled: False means that every call is a pass-through.
        cast_model_type: dtype the models' weights and inputs are cast to; ``None`` leaves them.
        patch_torch_functions: Whether functions are cast one by one (O1, O4).
        patch_torch_functions_type: The half dtype of those casts.
        keep_batchnorm_fp32: Whether affine batch norms stay in float32; ``None`` where no model
            is cast.
        keep_fp32: What stays in float32 where models are cast to half, batch norms aside.
        master_weights: Whether the optimizer updates float32 masters of half parameters.
        loss_scale: ``"dynamic"`` or a constant factor.
        min_loss_scale: Floor of the dynamic scale; ``None`` for the built-in limit.
        max_loss_scale: Ceiling of the dynamic scale.
        cast_model_outputs: dtype of the models' floating outputs; ``None`` means float32 where
            a model is cast or functions are cast inside of it only, and untouched elsewhere.
        scope: Where function casts hold: in the models' forward only, or in the whole thread.
        max_consecutive_skips: Skipped steps in a row after which ``step`` raises; ``None`` for
            never.
        overflow: What an overflow leads to: a step that is skipped and told; with ``"trace"`` the
            modules are watched all the time, to tell the first to go wrong too.
        storage: How masters and moments are kept between steps.
    """

    opt_level: str
    brief: str
    enabled: bool = True
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    keep_fp32: KeepFP32 = NOTHING
    master_weights: bool = False
    loss_scale: float | Literal["dynamic"] = 1.0
    min_loss_scale: float | None = None
    max_loss_scale: float | None = 2.0**24
    cast_model_outputs: torch.dtype | None = None
    scope: Scope = "model"
    max_consecutive_skips: int | None = 50
    overflow: OnOverflow = "skip"
    storage: Storage = FULL

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.loss_scale == "dynamic"

    @property
    def half_dtype(self) -> torch.dtype | None:
        """The half dtype this policy computes in, or ``None`` at full precision."""
        for dtype in (self.patch_torch_functions_type, self.cast_model_type):
            if dtype in (torch.float16, torch.bfloat16):
                return dtype
        return None

    def replace(self, **changes: object) -> Policy:
        """Return a copy with ``changes`` applied; the record itself never changes.

        ``keep_fp32`` and ``storage`` may be given as `initialize` takes them.
        """
        if "storage" in changes:
            changes["storage"] = parse_storage(changes["storage"])
        if "keep_fp32" in changes:
            changes["keep_fp32"] = parse_keep(changes["keep_fp32"])
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
