# SPDX-License-Identifier: BSD-3-Clause
"""What a sparse tensor consists of; torch's public names for it want it coalesced first."""

from __future__ import annotations

from typing import Any, cast

import torch


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices ``(sparse_dim, n)`` and values as stored: coalescing would synchronise."""
    inside = cast("Any", tensor)
    return inside._indices(), inside._values()
