# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.contrib.optimizers``, where the FusedAdam of early 2019 went on to live."""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.flat import FP16_Optimizer as FP16_Optimizer
from preamp.optim.fused import every as fused
from preamp.optim.fused.every import FusedLAMB as FusedLAMB
from preamp.optim.fused.every import FusedSGD as FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]


class FusedAdam(fused.FusedAdam):
    """The FusedAdam of early 2019, with its order of arguments; see `preamp.optimizers.FusedAdam`.

    ``p -= size * (m / (sqrt(v) + eps) + weight_decay * p)`` with
    ``size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)``, whatever arguments are given.

    ``use_mt`` has no effect, and ``amp_scale_adjustment`` must be 1; the other arguments are that
    class's.

    Raises:
        RuntimeError: ``amsgrad`` is set.
        ValueError: A negative number, betas that are not in [0, 1), or another
            ``amp_scale_adjustment``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
            use_mt=use_mt,
            amp_scale_adjustment=amp_scale_adjustment,
        )
