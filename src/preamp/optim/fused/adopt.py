# SPDX-License-Identifier: BSD-3-Clause
"""FusedADOPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from preamp.kernels.rules import AdoptRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import FusedOptimizer, Group, rule_of
from preamp.optim.fused.moments import TWO_MOMENTS


class FusedADOPT(FusedOptimizer):
    """ADOPT, for float16, bfloat16, float32 and float64 parameters.

    Adam whose gradient is divided by the second moment of the gradients before it, and only then
    enters the first moment, so that it converges with any ``beta2``. The first step of a parameter
    only lets ``v = g * g``. Later ``n = g / max(sqrt(v), eps)``, with ``clip`` kept between plus
    and minus ``(step - 1)**0.25``; ``m = beta1 * m + (1 - beta1) * n``; ``p -= lr * m``;
    ``v = beta2 * v + (1 - beta2) * g * g``. The weight decay is added to the gradient, or taken
    from the parameter with ``decouple``.

    State: ``exp_avg`` and ``exp_avg_sq`` in float32 whatever the parameter's dtype (float64 for
    float64). The step counter is ``group["step"]``. Does not synchronise. Source: Taniguchi et
    al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate"
    (arXiv:2411.02853).

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: The least that a gradient is divided by.
        weight_decay: Weight decay.
        decouple: Decay the parameter rather than add the decay to the gradient.
        clip: Keep gradients that are far beyond all before from the moment.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.

    Raises:
        ValueError: A negative number, or betas that are not in [0, 1).
    """

    is_elementwise: ClassVar[bool] = True
    _starts_apart: ClassVar[bool] = True
    _options: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")
    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none", "decouple", "clip")
    _wide_state: ClassVar[frozenset[str]] = frozenset(TWO_MOMENTS)
    moments: ClassVar[Mapping[str, Format]] = TWO_MOMENTS
    decouple: bool
    clip: bool

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        decouple: bool = False,
        clip: bool = True,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, locals())

    def _first_differs(self, group: Group) -> bool:
        """Of parameters that come later than others: a first step of all has the number 1."""
        return any(self._have_started(group["params"]))

    def _rule(self, group: Group) -> AdoptRule:
        return rule_of(AdoptRule, group, decoupled=self.decouple, is_bounded=self.clip)
