# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from preamp.engine.session import OptimizerSession
from preamp.optim import Twin


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter that ``optimizer`` updates: masters, and float32 parameters.

    After ``scale_loss`` their ``grad`` is unscaled, so this is what to clip by hand:
    ``torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), max_norm)``. Reading the
    ``grad`` of a master makes it; `preamp.clip_grad_norm_` clips without.

    Args:
        optimizer: Any optimizer, initialized or not.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def twin_of(half: torch.Tensor, sessions: Iterable[OptimizerSession]) -> Twin | None:
    """Return the pair of a model parameter and its master, or ``None``."""
    found = (s.masters.of_half(half) for s in sessions if s.masters is not None)
    return next((twin for twin in found if twin is not None), None)
