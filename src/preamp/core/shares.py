# SPDX-License-Identifier: BSD-3-Clause
"""How many elements of a tensor a rank has, where ranks share it."""

from __future__ import annotations

_TOGETHER = 64
"""Elements that stay on one rank: four vectors of AVX-512 in float32, and no less than a line of any
cache. Vectorised updates round the last elements of a tensor, too few for a vector, in other ways
than those before (fused multiply-adds or none); this way they are the same ones on all ranks."""


def share_of(elements: int, world_size: int) -> int:
    """The largest share of ``elements`` among ``world_size`` ranks: the first one's."""
    return min(elements, -(-elements // (world_size * _TOGETHER)) * _TOGETHER)
