# SPDX-License-Identifier: BSD-3-Clause
"""What a sparse tensor consists of; torch's public names for it want it coalesced first."""

from __future__ import annotations

from typing import Any, cast

import torch


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a COO tensor as they lie there, duplicates apart.

    The indices are int64 of shape ``(sparse_dim, n)``, the values have ``n`` rows. Does not
    synchronise: coalescing would, and would allocate.
    """
    inside = cast("Any", tensor)
    return inside._indices(), inside._values()
