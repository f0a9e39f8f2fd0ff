# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer updates, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from preamp.engine.session import OptimizerSession
from preamp.optim import MasterParameter, Twin


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


def first_device(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> torch.device:
    """The device of the first parameter; where loss scales and flags are kept."""
    for model in models:
        for param in model.parameters():
            return param.device
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                return param.device
    return torch.device("cpu")


def master_types(sessions: Iterable[OptimizerSession]) -> set[type[torch.Tensor]]:
    """The classes of all masters, and the one of masters that come later."""
    twins = [twin for session in sessions for twin in session.table.twins]
    return {MasterParameter, *(type(twin.master) for twin in twins)}


def twin_of(half: torch.Tensor, sessions: Iterable[OptimizerSession]) -> Twin | None:
    """Return the pair of a model parameter and its master, or ``None``."""
    found = (session.table.of_half(half) for session in sessions)
    return next((twin for twin in found if twin is not None), None)
