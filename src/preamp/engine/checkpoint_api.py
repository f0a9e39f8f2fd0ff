# SPDX-License-Identifier: BSD-3-Clause
"""``state_dict`` and ``load_state_dict`` of an engine, addressed by what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from preamp.engine.engine import Engine
from preamp.engine.loop import engine_of


def _engine(of: Any) -> Engine:
    return of if isinstance(of, Engine) else engine_of(of)


def state_dict(of: Engine | torch.optim.Optimizer | torch.nn.Module) -> dict[str, Any]:
    """Return loss scales and step counters of an engine as plain data.

    Together with the models' and optimizers' own ``state_dict`` this resumes training bitwise;
    masters are in the models' (float32, exact). Loads with ``torch.load(weights_only=True)``.

    Args:
        of: The engine, or an optimizer or model given to ``preamp.initialize``.

    Raises:
        PreampStateError: ``of`` has no engine.
    """
    return _engine(of).state_dict()


def load_state_dict(
    of: Engine | torch.optim.Optimizer | torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Take over what `state_dict` returned, or what Apex's ``amp.state_dict()`` did.

    Args:
        of: The engine, or an optimizer or model given to ``preamp.initialize``.
        state: Plain data.

    Raises:
        PreampStateError: ``of`` has no engine.
        ValueError: Scalers are missing, left over or unreadable; nothing was applied.
    """
    _engine(of).load_state_dict(state)
