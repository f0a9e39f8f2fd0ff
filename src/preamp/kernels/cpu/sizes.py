# SPDX-License-Identifier: BSD-3-Clause
"""How large blocks are, so that they stay in the cache of the core that computes them."""

from __future__ import annotations

import torch

name = "cpu"

SMALL_BLOCK = 1 << 16
"""Elements for each thread where a computation makes several temporaries of a block's size."""

LARGE_BLOCK = 1 << 18
"""Elements for each thread where torch's fused kernels make none; larger, since each call costs."""

LARGE_AT_LEAST = 1 << 19
"""Elements of a large block for few threads, which have a cache of many to themselves."""


def small() -> int:
    """Elements of a small block for all threads."""
    return SMALL_BLOCK * torch.get_num_threads()


def large() -> int:
    """Elements of a large block for all threads."""
    return max(LARGE_BLOCK * torch.get_num_threads(), LARGE_AT_LEAST)
