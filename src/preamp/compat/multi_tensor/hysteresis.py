# SPDX-License-Identifier: BSD-3-Clause
"""``amp_C.update_scale_hysteresis``."""

from __future__ import annotations

import torch

from preamp.compat.multi_tensor.checks import Call


def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Adjust a loss scale that shrinks only after several overflows. Does not synchronise.

    An overflow takes one from ``hysteresis_tracker``, and only where none is left is the scale
    multiplied by ``backoff_factor``. Every overflow starts the count of clean steps anew; a clean
    step refills the tracker, and ``growth_interval`` of them in a row multiply the scale by
    ``growth_factor``, unless the result were infinite. There is no floor.

    Args:
        current_scale: float32, shape ``(1,)``.
        growth_tracker: int32, shape ``(1,)``: clean steps in a row.
        hysteresis_tracker: int32, shape ``(1,)``: overflows still tolerated.
        found_inf: float32, shape ``(1,)``: positive after an overflow; not mutated.
        growth_factor: Above 1.
        backoff_factor: Below 1.
        growth_interval: Clean steps before the scale grows.
        hysteresis: What a clean step sets ``hysteresis_tracker`` to.

    Returns:
        ``current_scale``.

    Raises:
        RuntimeError: A tensor has another dtype, size or device.

    Mutates:
        ``current_scale``, ``growth_tracker`` and ``hysteresis_tracker``.
    """
    call = Call("update_scale_hysteresis", (), current_scale.device)
    scale = call.scalar("current_scale", current_scale)
    clean_steps = call.scalar("growth_tracker", growth_tracker, torch.int32)
    tolerated = call.scalar("hysteresis_tracker", hysteresis_tracker, torch.int32)
    is_inf = call.scalar("found_inf", found_inf) > 0

    left = tolerated - 1
    clean = clean_steps + 1
    grown = scale * growth_factor
    is_full = clean >= growth_interval
    grows = ~is_inf & is_full & torch.isfinite(grown)
    shrinks = is_inf & (left <= 0)
    scale.copy_(torch.where(shrinks, scale * backoff_factor, torch.where(grows, grown, scale)))
    clean_steps.copy_(clean.masked_fill(is_inf | is_full, 0))
    tolerated.copy_(torch.where(is_inf, left, hysteresis))
    return current_scale
