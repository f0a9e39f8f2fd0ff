# SPDX-License-Identifier: BSD-3-Clause
"""FusedLARS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from preamp.core.errors import bad_value
from preamp.kernels import backend
from preamp.kernels.rules import LarsRule
from preamp.optim.fused.base import REQUIRED, FusedOptimizer, Group, Signals, Work, rate_of
from preamp.optim.fused.checks import check_group, check_nesterov
from preamp.optim.fused.entries import Entries, batches
from preamp.optim.fused.norms import norms_of_parts, norms_of_wholes


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

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none", "materialize_master_grads")

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
        defaults: Group = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "is_skipped": False,
        }
        check_group("FusedLARS", defaults)  # first whether these are numbers
        check_nesterov("FusedLARS", nesterov=nesterov, momentum=momentum, dampening=dampening)
        _refuse_unused(dampening=dampening, wd_after_momentum=wd_after_momentum)
        settings = {"materialize_master_grads": materialize_master_grads}
        super().__init__(params, defaults, set_grad_none=set_grad_none, **settings)

    def _take_step(self, work: Work, signals: Signals) -> None:
        if signals.is_skip:
            return
        parts = [(group, batch) for group, entries in work for batch in batches(entries)]
        for (group, batch), norms in zip(parts, self._norms(parts, signals), strict=True):
            inv_scale, found_inf = signals.inv_scale, signals.found_inf
            update = batch.update(inv_scale=inv_scale, found_inf=found_inf, norms=norms)
            self._apply(batch, self._state(batch.params, "momentum_buffer"), _rule(group), update)

    def _norms(
        self, parts: Sequence[tuple[Group, Entries]], signals: Signals
    ) -> list[torch.Tensor | None]:
        ops, own = backend(self.backend), [batch for _, batch in parts]

        def measure(place: int) -> torch.Tensor:
            params, grads = own[place].params, own[place].grads
            factor = own[place].update(inv_scale=signals.inv_scale).inv_scale
            weights = norms_of_parts(params, None, params, ops)
            return torch.stack([weights, norms_of_parts(grads, factor, params, ops)])

        return norms_of_wholes(own, measure, self.splits)


def _rule(group: Group) -> LarsRule:
    return LarsRule(
        lr=rate_of(group),
        momentum=group["momentum"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        trust_coefficient=group["trust_coefficient"],
        eps=group["eps"],
        uses_trust_ratio=not group["is_skipped"],
    )


def _refuse_unused(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise bad_value(
                f"FusedLARS got {name}={value!r}",
                f"Its update rule has no {name}; Apex accepts and ignores it",
                f"Leave {name} out",
            )
