# SPDX-License-Identifier: BSD-3-Clause
"""torch's own operations for the reaction of a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, cast

import torch

clamp_ = torch.Tensor.clamp_
"""As it was before any cast was installed: a loss scale is float32 whatever is cast."""

UPDATES_SCALE_ON: Container[str] = frozenset({"cpu", "cuda", "xpu"})
"""The types of devices that have it."""

update_scale_ = cast(
    "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int], torch.Tensor]",
    cast("Any", torch)._amp_update_scale_,
)
"""Halve or double a loss scale in one operation, as ``torch.amp.GradScaler`` does.

Takes the scale, float32; the number of clean steps in a row, int32; a flag, float32, not zero after
an overflow; the factors of growth and of backing off, in float64; and after how many clean steps in
a row the scale grows. Scalars on one device; the first two are mutated. Does not synchronise, and
knows no bounds.
"""
