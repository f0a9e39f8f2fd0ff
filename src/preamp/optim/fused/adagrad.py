# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdagrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from preamp.kernels.rules import AdagradRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import FusedOptimizer, Group, rule_of


class FusedAdagrad(FusedOptimizer):
    """Adagrad, for float16, bfloat16, float32 and float64 parameters.

    ``g += weight_decay * p``; ``h += g * g``; ``p -= lr * g / (sqrt(h) + eps)``. With
    ``adagrad_w_mode`` the decay leaves ``h`` alone:
    ``p -= lr * (g / (sqrt(h) + eps) + weight_decay * p)``. `torch.optim.Adagrad` computes the
    first.

    State: ``sum`` in the parameter's dtype. Does not synchronise.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.
        adagrad_w_mode: Decay the parameter rather than add the decay to the gradient.

    Raises:
        ValueError: A negative number.
    """

    is_elementwise = True
    _counts = False
    _options = ("lr", "eps", "weight_decay")
    _settings = ("set_grad_none", "adagrad_w_mode")
    moments: ClassVar = {"sum": Format.UNSIGNED}

    adagrad_w_mode: bool

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _rule(self, group: Group) -> AdagradRule:
        return rule_of(AdagradRule, group, decoupled=self.adagrad_w_mode)
