# SPDX-License-Identifier: BSD-3-Clause
"""Mean and variance per channel over the batches of several ranks, which may differ in size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from preamp.core.dtypes import math_dtype
from preamp.distributed.groups import collectives


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a synchronised batch norm normalises with; float32, float64 for float64 inputs.

    Attributes:
        mean: Shape ``(channels,)``.
        var: Biased variance, shape ``(channels,)``.
        count: Values per channel on all ranks together, a scalar tensor.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    @property
    def unbiased_var(self) -> torch.Tensor:
        """Sum of squared deviations divided by ``count - 1``."""
        return self.var * self.count / (self.count - 1).clamp(min=1)


def over_all_but_channels(x: torch.Tensor) -> list[int]:
    """The dimensions that statistics are taken over, for a tensor with its channels second."""
    return [dim for dim in range(x.dim()) if dim != 1]


def merged_statistics(x: torch.Tensor, group: dist.ProcessGroup | None) -> Statistics:
    """Return the statistics of all ranks' ``x`` as of one batch.

    Every rank contributes its count n, mean μ and sum of squared deviations M, all of one
    all-gather; then, after Chan, Golub and LeVeque (1979),

        n = Σ nᵢ,  μ = μ₀ + Σ nᵢ·(μᵢ - μ₀) / n,  n·σ² = Σ Mᵢ + nᵢ·(μᵢ - μ)²

    which is exact for batches of different sizes, an empty one included. Nothing cancels as in a
    difference of sums, and where the means are close μ is rounded once.

    Args:
        x: Shape ``(batch, channels, …)``, any floating dtype; computed on in float32, or float64.
        group: The ranks; ``None`` for all.
    """
    parts = _gather(_local_moments(x), group)
    counts, means, squares = parts[:, :1], *parts[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = means[0] + (counts * (means - means[0])).sum(0) / count
    deviations = squares + counts * (means - mean).square()
    return Statistics(mean, deviations.sum(0) / count, count)


def _local_moments(x: torch.Tensor) -> torch.Tensor:
    """``[n, μ…, M…]`` of this rank's batch, shape ``(1 + 2 · channels,)``."""
    count = x.numel() // x.size(1)
    if count == 0:  # the mean of nothing is nan, and so would be all that it is merged into
        return x.new_zeros(1 + 2 * x.size(1), dtype=math_dtype(x.dtype))
    wide = x.to(math_dtype(x.dtype))
    var, mean = torch.var_mean(wide, over_all_but_channels(x), correction=0)
    return torch.cat([mean.new_full((1,), count), mean, var * count])


def _gather(own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(parts, own, group=group)
    return torch.stack(parts)
