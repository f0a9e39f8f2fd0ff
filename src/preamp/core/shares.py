# SPDX-License-Identifier: BSD-3-Clause
"""How many elements of a tensor a rank has, where ranks share it."""

from __future__ import annotations

_TOGETHER = 64
"""Elements that stay together: four vectors of AVX-512 in float32, two of half numbers.

Vectorised updates round a tensor's last elements, too few for a vector, in other ways than those
before (with or without fused multiply-adds); with shares like this they are the ones they were."""


def share_of(elements: int, world_size: int) -> int:
    """The largest share of ``elements`` among ``world_size`` ranks: the first one's."""
    return min(elements, -(-elements // (world_size * _TOGETHER)) * _TOGETHER)
