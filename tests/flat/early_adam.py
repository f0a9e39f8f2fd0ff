# SPDX-License-Identifier: BSD-3-Clause
"""A tiny optimizer with the calling convention of the FusedAdam of early 2019."""

from collections.abc import Callable
from typing import Any

import torch


class EarlyAdam(torch.optim.Optimizer):
    """Takes scaled gradients from outside, clips per group, and writes a half copy.

    Its update is the early one without bias correction: ``g = grad / c``, moments,
    ``p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)``, where ``c`` is the scale, larger where
    the unscaled norm exceeds ``max_grad_norm``.
    """

    def __init__(self, params: Any, lr: float = 0.125, **options: float) -> None:
        defaults = {"lr": lr, "betas": (0.5, 0.75), "eps": 2.0**-10, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "max_grad_norm": 0.0, **options})
        self.calls: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: list[list[torch.Tensor | None]] | None = None,
        output_params: list[list[torch.Tensor]] | None = None,
        scale: float = 1.0,
        grad_norms: list[float] | None = None,
    ) -> None:
        assert closure is None
        assert grads is not None
        assert output_params is not None
        assert grad_norms is not None
        self.calls.append({"scale": scale, "grad_norms": grad_norms})
        groups = zip(self.param_groups, grads, output_params, grad_norms, strict=True)
        for group, group_grads, outputs, norm in groups:
            factor = scale
            if group["max_grad_norm"] > 0:
                clip = (norm / scale + 1e-6) / group["max_grad_norm"]
                factor = scale * max(clip, 1.0)
            for param, grad, output in zip(group["params"], group_grads, outputs, strict=True):
                if grad is not None:
                    self._update(group, param, grad, factor)
                    output.copy_(param)

    def _update(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, factor: float
    ) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param))
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        unscaled = grad.float() / factor
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(unscaled, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(unscaled, unscaled, value=1 - beta2)
        change = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * param
        param.sub_(change, alpha=group["lr"])
