# SPDX-License-Identifier: BSD-3-Clause
"""float32 copies of half parameters that an optimizer keeps by itself, outside of any engine."""

from __future__ import annotations

from typing import Any

import torch

from preamp.optim.fused.checks import check_has_state

MASTER = "master_param"
"""State key of the copy; in the state, so that it is in checkpoints too."""


def copy_of(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The copy of ``param`` in its ``state``, beside the parameter.

    Made at the first step rather than at construction, so that weights loaded or broadcast in
    between count. Later writes to the parameter count as well, however they are made, since updates
    take half weights for the truth.
    """
    if MASTER not in state:
        check_has_state(param)
        state[MASTER] = param.detach().float()
    state[MASTER] = state[MASTER].to(param.device)
    return state[MASTER]
