# SPDX-License-Identifier: BSD-3-Clause
"""What each rank does in ``tests/engine/test_accumulation_on_ranks.py``."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp

LEVELS = ("O0", "O1", "O2", "O5")
MODES = ("sync", "no_sync", "delay")
STEPS = 3  # DistributedDataParallel rebuilds its buckets, and moves gradients, in the second


def inputs(rank: int, step: int, part: int) -> torch.Tensor:
    """Small whole numbers: sums and means of their products are exact in half precision."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randint(-4, 5, (2, 2), generator=generator).float()


def accumulate(rank: int) -> dict[str, list[torch.Tensor]]:
    """For every case the unscaled gradients after each step's last backward."""
    return {
        f"{level}-{mode}-{view}-{scale}": _gradients(rank, level, mode, view, scale)
        for level, mode, view, scale in itertools.product(
            LEVELS, MODES, (False, True), (128.0, "dynamic")
        )
    }


def _gradients(rank: int, level: str, mode: str, view: bool, scale: Any) -> list[torch.Tensor]:
    model: Any = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    engine = preamp.engine_of(model)
    wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=view)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        for part in range(2):
            is_last = part == 1
            # Without delay_unscale every block unscales, gradients of this rank alone included.
            delay = mode == "delay" and not is_last
            with nullcontext() if is_last or mode == "sync" else wrapped.no_sync():
                loss = wrapped(inputs(rank, step, part)).float().sum() / 64
                with preamp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
                    scaled.backward()
        (param,) = preamp.master_params(optimizer)
        assert param.grad is not None
        found.append(param.grad.clone())
        optimizer.step()
        # Zeroed in place the gradients go on lying in the buckets; dropped they do not.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    engine.close()
    return found
