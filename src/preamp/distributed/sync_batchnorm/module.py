# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm whose statistics are those of the batches on all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from preamp.core.dtypes import math_dtype
from preamp.core.errors import bad_value
from preamp.core.ranks import has_process_group
from preamp.distributed.groups import collectives


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a synchronised batch norm normalises with; float32, float64 for float64 inputs."""

    mean: torch.Tensor  # shape ``(channels,)``
    var: torch.Tensor  # biased variance, shape ``(channels,)``
    count: torch.Tensor  # values per channel on all ranks together, a scalar tensor

    @property
    def unbiased_var(self) -> torch.Tensor:
        """Sum of squared deviations divided by ``count - 1``."""
        return self.var * self.count / (self.count - 1).clamp(min=1)


def over_all_but_channels(x: torch.Tensor) -> list[int]:
    """The dimensions that statistics are taken over, for a tensor with its channels second."""
    return [dim for dim in range(x.dim()) if dim != 1]


def merged_statistics(x: torch.Tensor, group: dist.ProcessGroup | None) -> Statistics:
    """Return the statistics of all ranks' ``x``, ``(batch, channels, …)``, as of one batch.

    Every rank contributes its count n, mean μ and sum of squared deviations M, all of one
    all-gather; then, after Chan, Golub and LeVeque (1979),

        n = Σ nᵢ,  μ = μ₀ + Σ nᵢ·(μᵢ - μ₀) / n,  n·σ² = Σ Mᵢ + nᵢ·(μᵢ - μ)²

    which is exact for batches of different sizes, an empty one included. Nothing cancels as in a
    difference of sums, and where the means are close μ is rounded once. The arithmetic is in
    float32, or float64 for float64.
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


class Normalize(torch.autograd.Function):
    """``y = (x - μ) · r · w + b`` with ``r = 1 / sqrt(σ² + eps)``, where μ and σ² depend on x.

    They are those of all ranks, so the gradient of x on one rank has terms of the others. With
    sums over all ranks, n values per channel, and x̂ = (x - μ)·r:

        dx = w · r · (dy - Σdy / n - x̂ · Σ(dy·x̂) / n)
        dw = Σ dy·x̂,  db = Σ dy       over this rank alone: averaging them is DDP's business

    Loads x and dy in their own dtype, computes in that of the statistics, rounds once on store.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: Statistics,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        dtype = statistics.mean.dtype
        ctx.save_for_backward(x, weight, bias, statistics.mean, statistics.var, statistics.count)
        ctx.eps, ctx.group = eps, group
        return F.batch_norm(
            x,
            statistics.mean,
            statistics.var,
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            eps=eps,
        )

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> Any:
        x, weight, bias, mean, var, count = ctx.saved_tensors
        dims = over_all_but_channels(x)
        shape = (1, -1, *(1 for _ in dims[1:]))
        rstd = torch.rsqrt(var + ctx.eps)
        dy_wide = grad_outputs[0].to(mean.dtype)
        x_hat = (x.to(mean.dtype) - mean.view(shape)) * rstd.view(shape)
        sums = torch.stack([dy_wide.sum(dims), (dy_wide * x_hat).sum(dims)])
        dx = dw = db = None
        if weight is not None and ctx.needs_input_grad[1]:
            dw = sums[1].to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            db = sums[0].to(bias.dtype)
        if ctx.needs_input_grad[0]:
            everywhere = sums.clone()
            collectives.all_reduce(everywhere, group=ctx.group)
            mean_dy, mean_dy_x_hat = (everywhere / count).unbind()
            factor = rstd if weight is None else rstd * weight.to(rstd.dtype)
            centred = dy_wide - mean_dy.view(shape) - x_hat * mean_dy_x_hat.view(shape)
            dx = (centred * factor.view(shape)).to(x.dtype)
        return dx, dw, db, None, None, None


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
        return dist.get_world_size(self.process_group) if has_process_group() else 1

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


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every batch norm in ``module`` by a `SyncBatchNorm` with the same values.

    Weights and biases become new parameters: convert before the optimizer is built, and before
    ``preamp.initialize``. Running statistics stay the same tensors. Training mode and
    ``requires_grad`` are carried over, hooks are not. Instance norms stay what they are.

    Args:
        module: Any model; a batch norm used in several places stays one layer.
        process_group: The ranks to share statistics with; ``None`` for all.
        channel_last: Whether the inputs have their channels last.

    Returns:
        ``module``, or its replacement if it is a batch norm itself.

    Raises:
        ValueError: A lazy batch norm does not know its number of channels yet; nothing was
            replaced.

    Mutates:
        ``module``.
    """
    made: dict[int, nn.Module] = {}
    tree: Any = module
    for name, old in tree.named_modules():
        if isinstance(old, _BATCH_NORM):
            _refuse_lazy(name, old)
            made[id(old)] = _synchronised(old, process_group, channel_last)
    for path, old in list(tree.named_modules(remove_duplicate=False)):
        if path and id(old) in made:
            tree.set_submodule(path, made[id(old)])
    return made.get(id(module), module)


def _refuse_lazy(name: str, old: Any) -> None:
    if old.num_features == 0:
        raise bad_value(
            f"The batch norm {name!r} does not know its number of channels yet",
            "Allowed are batch norms with parameters",
            "Run one forward before convert_syncbn_model",
        )


def _synchronised(
    old: Any, process_group: dist.ProcessGroup | None, channel_last: bool
) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        process_group,
        channel_last,
        getattr(old, "fuse_relu", False),
    )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(old, name))
    for name in ("weight", "bias"):
        param: torch.Tensor | None = getattr(old, name)
        if param is not None:
            copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            setattr(new, name, copy)
    return new.train(old.training)
