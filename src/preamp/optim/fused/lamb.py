# SPDX-License-Identifier: BSD-3-Clause
"""FusedLAMB, and what it shares with its mixed-precision form."""

from __future__ import annotations

from typing import Any

import torch

from preamp.kernels.rules import LambRule
from preamp.optim.fused.base import FusedOptimizer, Group, Signals, Work, rule_of
from preamp.optim.fused.moments import TWO_MOMENTS
from preamp.optim.fused.norms import clip_factor


class Lamb(FusedOptimizer):
    """What both have."""

    _options = (
        *("lr", "bias_correction", "betas", "eps", "weight_decay"),
        *("grad_averaging", "max_grad_norm"),
    )

    adam_w_mode: bool
    use_nvlamb: bool

    def _unscaling(self, work: Work, signals: Signals) -> torch.Tensor | None:
        every, most = [entries for _, entries in work], self.defaults["max_grad_norm"]
        return clip_factor(every, most, signals.inv_scale, self._ops, self.splits)

    def _rule(self, group: Group) -> LambRule:
        return rule_of(
            LambRule,
            group,
            decoupled=self.adam_w_mode,
            uses_trust_ratio=self.use_nvlamb or group["weight_decay"] != 0,
        )


class FusedLAMB(Lamb):
    """LAMB, for float16, bfloat16, float32 and float64 parameters.

    Gradients of all groups together are clipped to ``max_grad_norm``. Then, with Adam's corrected
    moments, ``u = m / (sqrt(v) + eps) + weight_decay * p`` and per tensor
    ``p -= lr * |p| / |u| * u``; tensors without weight decay take ``p -= lr * u`` unless
    ``use_nvlamb``. Gradients are left as they are.

    State: ``exp_avg`` and ``exp_avg_sq`` in the parameter's dtype. The step counter is
    ``group["step"]``. Does not synchronise.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Correct the moments for the number of steps.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        adam_w_mode: Add the decay to the update rather than to the gradient.
        grad_averaging: Weigh a new gradient by ``1 - betas[0]`` rather than by 1.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.
        max_grad_norm: Largest global gradient norm; 0 for no clipping. Of all groups alike.
        use_nvlamb: Use the trust ratio for tensors without weight decay too.

    Raises:
        RuntimeError: ``amsgrad`` is set.
        ValueError: A negative number, or betas that are not in [0, 1).
    """

    _settings = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    moments = TWO_MOMENTS

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        super().__init__(params, locals())
