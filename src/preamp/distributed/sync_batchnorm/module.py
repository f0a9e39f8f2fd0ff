# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm whose statistics are those of the batches on all ranks together."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from preamp.core.errors import bad_value
from preamp.distributed.groups import group_is_ready
from preamp.distributed.sync_batchnorm.function import Normalize
from preamp.distributed.sync_batchnorm.statistics import Statistics, merged_statistics

# The common base of all batch norms has no public name of its own. As one of them this class is
# kept in float32 at O2 and O5.
_BATCH_NORM: Any = nn.BatchNorm1d.__bases__[0]


class SyncBatchNorm(_BATCH_NORM):
    """Batch norm over ``(batch, channels, …)`` with statistics over a group of ranks.

    ``y = (x - mean) / sqrt(var + eps) · weight + bias``, where in training mean and biased
    variance are taken over the inputs of all ranks as if they were one batch; their sizes may
    differ. On one process, without a process group too, it is a plain batch norm, and in
    evaluation it uses the running statistics and talks to nobody.

    Statistics and arithmetic are in float32 (float64 for float64 inputs), so half inputs meet
    float32 parameters well. The output has the input's dtype. ``z`` and the ReLU follow on the
    rounded output.

    Formula: Ioffe and Szegedy, 2015, arXiv:1502.03167.
    """

    num_features: int
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        """Make a layer for inputs with ``num_features`` channels.

        Args:
            num_features: Number of channels.
            eps: Added to the variance.
            momentum: Weight of the newest batch in the running statistics; ``None`` gives all
                batches so far equal weight.
            affine: Whether there are ``weight`` and ``bias``.
            track_running_stats: Whether to keep running statistics for evaluation. Without, it
                uses the statistics of this process's own input.
            process_group: The ranks to share statistics with; ``None`` for all.
            channel_last: Whether channels are the last dimension instead of the second.
            fuse_relu: Whether to apply a ReLU to the result.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats)  # pyright: ignore[reportUnknownMemberType]
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise ``input``.

        Args:
            input: Shape ``(batch, channels, …)``, or ``(batch, …, channels)`` if
                ``channel_last``; with two dimensions these are the same.
            z: A residual of the same shape, added before the ReLU.

        Raises:
            ValueError: The shape does not fit, or there is one value per channel in training.

        Mutates:
            The running statistics, in training. Synchronises the ranks of the group then.
        """
        self._check_input(input, z)
        moved = self.channel_last and input.dim() > 2
        out = self._normalize(input.movedim(-1, 1) if moved else input)
        if moved:
            out = out.movedim(1, -1)
        if z is not None:
            out = out + z.to(out.dtype)
        return F.relu(out) if self.fuse_relu else out

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``, whose channels are the second dimension."""
        if self.training and self._world_size() > 1:
            return self._normalize_together(x)
        uses_own = self.training or self.running_mean is None or self.running_var is None
        if uses_own:
            self._refuse_one_value(x)
        keeps_running = self.track_running_stats or not self.training
        return F.batch_norm(
            x,
            self.running_mean if keeps_running else None,
            self.running_var if keeps_running else None,
            self.weight,
            self.bias,
            uses_own,
            float(self._newest_weight()) if self.training and keeps_running else 0.0,
            self.eps,
        )

    def _normalize_together(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            statistics = merged_statistics(x, self.process_group)
            if self.track_running_stats:
                self._update_running(statistics)
        return cast("Any", Normalize).apply(
            x, self.weight, self.bias, statistics, self.eps, self.process_group
        )

    def _update_running(self, statistics: Statistics) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        newest = self._newest_weight()
        for running, new in (
            (self.running_mean, statistics.mean),
            (self.running_var, statistics.unbiased_var),
        ):
            running.copy_(running + newest * (new - running))

    def _newest_weight(self) -> torch.Tensor | float:
        """Count this batch, and return its weight in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1.0 if self.num_batches_tracked is None else 1.0 / self.num_batches_tracked

    def _world_size(self) -> int:
        return dist.get_world_size(self.process_group) if group_is_ready() else 1

    def _check_input(self, x: torch.Tensor, z: torch.Tensor | None) -> None:
        channels = 0
        if x.dim() > 1:
            channels = x.size(-1 if self.channel_last else 1)
        if channels != self.num_features:
            raise bad_value(
                f"SyncBatchNorm({self.num_features}) was given an input of shape "
                f"{tuple(x.shape)} with channel_last={self.channel_last}",
                f"It takes inputs of two dimensions or more with {self.num_features} channels",
                "Set num_features and channel_last to what the input is",
            )
        if z is not None and z.shape != x.shape:
            raise bad_value(
                f"SyncBatchNorm was given z of shape {tuple(z.shape)} with an input of shape "
                f"{tuple(x.shape)}",
                "z must have the shape of the input",
                "Bring the residual to that shape first",
            )

    def _refuse_one_value(self, x: torch.Tensor) -> None:
        if x.numel() == self.num_features:
            raise bad_value(
                f"SyncBatchNorm was given one value per channel, shape {tuple(x.shape)}",
                "It needs more than one, since one value has no variance",
                "Pass a larger batch, or call eval() on the module",
            )

    def extra_repr(self) -> str:
        """Name the arguments."""
        common = cast("str", super().extra_repr())  # pyright: ignore[reportUnknownMemberType]
        return f"{common}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"
