# SPDX-License-Identifier: BSD-3-Clause
"""A check that one rank fails while the other waits for it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_fails_on_rank_1() -> None:
    dist.all_reduce(torch.zeros(1))  # a rank that is gone before the other has joined fails that
    assert dist.get_rank() == 0, "on purpose"
    dist.all_reduce(torch.zeros(1))
