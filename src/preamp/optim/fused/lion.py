# SPDX-License-Identifier: BSD-3-Clause
"""FusedLion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from preamp.kernels.rules import LionRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import FusedOptimizer, Group, rule_of


class FusedLion(FusedOptimizer):
    """Lion, for float16, bfloat16, float32 and float64 parameters.

    ``u = sign(beta1 * m + (1 - beta1) * g)``; ``m = beta2 * m + (1 - beta2) * g``;
    ``p -= lr * (u + weight_decay * p)``. Every element moves by ``lr``, so it takes a learning rate
    three to ten times smaller than Adam's, and a weight decay as many times larger.

    A gradient that is nan makes its weight nan, where `torch.sign` would make a step of zero of it.

    State: ``exp_avg`` in the parameter's dtype. The step counter is ``group["step"]``. Does not
    synchronise. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms"
    (arXiv:2302.06675).

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Weight of the moment in the step, and its decay.
        weight_decay: Weight decay, of the parameter.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.

    Raises:
        ValueError: A negative number, or betas that are not in [0, 1).
    """

    is_elementwise: ClassVar[bool] = True
    _options: ClassVar[tuple[str, ...]] = ("lr", "betas", "weight_decay")
    moments: ClassVar[Mapping[str, Format]] = {"exp_avg": Format.SIGNED}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, locals())

    def _rule(self, group: Group) -> LionRule:
        return rule_of(LionRule, group)
