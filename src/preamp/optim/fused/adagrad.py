# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdagrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from preamp.kernels import AdagradRule
from preamp.optim.fused.base import (
    Batch,
    Closure,
    FusedOptimizer,
    Group,
    Signals,
    batches,
    evaluate,
    rate_of,
)
from preamp.optim.fused.checks import check_numbers, check_one_device


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

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        check_numbers("FusedAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Re-evaluates the model with gradients enabled and returns the loss.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse or of a dtype that is not updated, or the tensors
                of a group lie on several devices.
        """
        loss = evaluate(closure)
        with torch.no_grad():
            work, signals = self._collect(), Signals.of(self)
            for _, entries in work:
                check_one_device("FusedAdagrad", entries.params)
            if not signals.is_skip:
                for group, entries in work:
                    for batch in batches(entries):
                        self._update(group, batch, signals)
            self._finish(work, signals)
        return loss

    def _update(self, group: Group, batch: Batch, signals: Signals) -> None:
        update = batch.update(inv_scale=signals.inv_scale, found_inf=signals.found_inf)
        self._apply(batch, self._state(batch.params, "sum"), self._rule(group), update)

    def _rule(self, group: Group) -> AdagradRule:
        return AdagradRule(
            lr=rate_of(group),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.adagrad_w_mode,
        )
