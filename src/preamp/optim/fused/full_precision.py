# SPDX-License-Identifier: BSD-3-Clause
"""float32 copies of half parameters that an optimizer keeps by itself, outside of any engine."""

from __future__ import annotations

from typing import Any

import torch

from preamp.optim.fused.checks import check_has_state
from preamp.optim.pairs import take_over

MASTER = "master_param"
"""State key of the copy; in the state, so that it is in checkpoints too."""


def copy_of(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The copy of ``param`` in its ``state``, with what was written to the parameter.

    Made at the first step rather than at construction, so that weights loaded or broadcast in
    between count. Later writes to the parameter count as well, however they are made: elements
    that still equal their rounded copy keep its precision.
    """
    if MASTER not in state:
        check_has_state(param)
        state[MASTER] = param.detach().float()
    state[MASTER] = state[MASTER].to(param.device)
    take_over(param, state[MASTER])
    return state[MASTER]
