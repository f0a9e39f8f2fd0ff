# SPDX-License-Identifier: BSD-3-Clause
"""FusedLARS."""

from __future__ import annotations

from typing import Any

import torch

from preamp.core.errors import bad_value
from preamp.kernels.rules import LarsRule
from preamp.optim.fused.base import REQUIRED, FusedOptimizer, Group, rule_of


class FusedLARS(FusedOptimizer):
    """LARS, for float16, bfloat16, float32 and float64 parameters.

    Per tensor ``s = lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``, or ``lr``
    where a norm is zero or ``group["is_skipped"]`` is set (biases and normalisation layers,
    usually); ``m = momentum * m - s * (g + weight_decay * p)``; ``p += m``. The learning rate is
    inside the momentum, unlike in `FusedSGD`.

    State: ``momentum_buffer`` in the parameter's dtype. Does not synchronise.

    Args:
        params: Parameters or groups; a group may set ``is_skipped`` and ``trust_coefficient``.
        lr: Learning rate; required here or in every group.
        momentum: Decay of the momentum.
        dampening: Must be 0.
        weight_decay: Weight decay, added to the gradient.
        trust_coefficient: Factor of the trust ratio.
        eps: Added to the denominator of the trust ratio.
        nesterov: Look ahead along the momentum.
        wd_after_momentum: Must be ``False``.
        materialize_master_grads: Has no effect, see `FusedSGD`.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.

    Raises:
        ValueError: A negative number, nesterov without momentum, or an argument that Apex accepts
            and ignores.
    """

    _options = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "nesterov")
    _counts = False
    _more_state = ("momentum_buffer",)
    _settings = ("set_grad_none", "materialize_master_grads")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = REQUIRED,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        super().__init__(params, {**locals(), "is_skipped": False}, more=("is_skipped",))
        unused = {"dampening": dampening, "wd_after_momentum": wd_after_momentum}
        for name, value in unused.items():
            if value:
                raise bad_value(
                    f"FusedLARS got {name}={value!r}",
                    f"Its update rule has no {name}; Apex accepts and ignores it",
                    f"Leave {name} out",
                )

    def _rule(self, group: Group) -> LarsRule:
        return rule_of(LarsRule, group, uses_trust_ratio=not group["is_skipped"])
