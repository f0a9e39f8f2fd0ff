# SPDX-License-Identifier: BSD-3-Clause
"""FusedSGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels import Rule, Update
from preamp.kernels.rules import SgdRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import (
    REQUIRED,
    FusedOptimizer,
    Group,
    Signals,
    Work,
    rule_of,
    scalar_on,
)
from preamp.optim.fused.entries import Entries
from preamp.optim.fused.norms import Call


class FusedSGD(FusedOptimizer):
    """Gradient descent with momentum, for float16, bfloat16, float32 and float64 parameters.

    ``g += weight_decay * p``; ``m = g`` at a parameter's first step, later
    ``m = momentum * m + (1 - dampening) * g``; ``p -= lr * m``, with nesterov
    ``p -= lr * (g + momentum * m)``. `torch.optim.SGD` computes the same.

    State: ``momentum_buffer`` in the parameter's dtype. Does not synchronise.

    Attributes:
        most_recent_scale: Gradients are divided by this in the next step, which resets it to 1.
            Nothing in preamp sets it: `preamp.scale_loss` unscales gradients itself.
        scale_set_by_backward: Whether a backward set it; reset to ``False`` by ``step``.

    Args:
        params: Parameters or groups.
        lr: Learning rate; required here or in every group.
        momentum: Decay of the momentum.
        dampening: A new gradient enters the momentum with weight ``1 - dampening``.
        weight_decay: Weight decay.
        nesterov: Look ahead along the momentum.
        wd_after_momentum: Add the decay after the momentum.
        materialize_master_grads: Has no effect: gradients of masters are made when they are
            read, so both values give the same numbers at the same cost.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.

    Raises:
        ValueError: A negative number, or nesterov without momentum or with dampening.
    """

    is_elementwise = True
    _counts = False
    _starts_apart = True
    _options = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    _settings = (
        *("set_grad_none", "wd_after_momentum", "materialize_master_grads"),
        *("most_recent_scale", "scale_set_by_backward"),
    )
    moments: ClassVar = {"momentum_buffer": Format.SIGNED}

    wd_after_momentum: bool
    materialize_master_grads: bool
    most_recent_scale: float
    scale_set_by_backward: bool

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = REQUIRED,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        attributes = {"most_recent_scale": 1.0, "scale_set_by_backward": False}
        super().__init__(params, {**locals(), **attributes})

    def _take_step(self, work: Work, signals: Signals) -> None:
        super()._take_step(work, signals)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def _first_differs(self, group: Group) -> bool:
        """Whether the first gradient does to a momentum what no later one does to zeros."""
        return group["momentum"] != 0 and group["dampening"] != 0

    def _count(self, group: Group, signals: Signals) -> int | torch.Tensor:
        """What rounding by chance needs, and more than 1 where there is a momentum."""
        return super()._count(group, signals) + 1

    def _rule(self, group: Group) -> SgdRule:
        return rule_of(SgdRule, group, decays_after_momentum=self.wd_after_momentum)

    def _call(self, group: Group, batch: Entries, rule: Rule, update: Update) -> Call:
        if self.most_recent_scale != 1.0:
            param, by = batch.params[0], update.inv_scale
            inverse = 1.0 / self.most_recent_scale
            own = scalar_on(inverse, math_dtype(param.dtype), param.device)
            update = replace(update, inv_scale=own if by is None else own * by.to(own.device))
        return super()._call(group, batch, rule, update)
