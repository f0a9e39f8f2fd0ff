# SPDX-License-Identifier: BSD-3-Clause
"""Normalise by given statistics, and the backward through statistics shared by all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from preamp.distributed.groups import collectives
from preamp.distributed.sync_batchnorm.statistics import Statistics, over_all_but_channels


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
