# SPDX-License-Identifier: BSD-3-Clause
"""Which DistributedDataParallel a forward runs in; torch knows it, but not in public."""

from __future__ import annotations

from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel


def reduces_next_backward() -> bool | None:
    """Whether the backward of the forward under way will all-reduce gradients.

    Returns:
        False under ``no_sync()``; ``None`` outside of a DistributedDataParallel's forward.
    """
    active: Any = getattr(cast("Any", DistributedDataParallel), "_active_ddp_module", None)
    return None if active is None else bool(active.require_backward_grad_sync)
