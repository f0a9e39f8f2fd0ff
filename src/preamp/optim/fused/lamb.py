# SPDX-License-Identifier: BSD-3-Clause
"""FusedLAMB, and what it shares with its mixed-precision form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from preamp.core.splits import Splits
from preamp.kernels import Ops, Update, backend
from preamp.kernels.rules import LambRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import FusedOptimizer, Group, Signals, Work, count_step, rate_of
from preamp.optim.fused.checks import refuse_amsgrad
from preamp.optim.fused.entries import Entries, batches
from preamp.optim.fused.moments import TWO_MOMENTS
from preamp.optim.fused.norms import clip_factor, norms_of_wholes


class FusedLAMB(FusedOptimizer):
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

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    moments: ClassVar[Mapping[str, Format]] = TWO_MOMENTS

    adam_w_mode: bool
    use_nvlamb: bool

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
        refuse_amsgrad("FusedLAMB", amsgrad=amsgrad)
        defaults: Group = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        settings = {"adam_w_mode": adam_w_mode, "use_nvlamb": use_nvlamb}
        super().__init__(params, defaults, set_grad_none=set_grad_none, **settings)

    def _take_step(self, work: Work, signals: Signals) -> None:
        if signals.is_skip:
            return
        ops, max_norm = backend(self.backend), self.defaults["max_grad_norm"]
        every = [entries for _, entries in work]
        factor = clip_factor(every, max_norm, signals.inv_scale, ops, self.splits)
        parts: list[LambPart] = []
        for group, entries in work:
            step = count_step(group, signals)
            rule = lamb_rule(group, decoupled=self.adam_w_mode, use_nvlamb=self.use_nvlamb)
            for batch in batches(entries, self._apart()):
                update = batch.update(step=step, inv_scale=factor, found_inf=signals.found_inf)
                state = self._state(batch.params, *self.moments)
                update = self._told(batch.params, update)
                parts.append(LambPart(batch, [batch.targets, batch.grads, *state], rule, update))
        apply_lamb(parts, ops, self.splits)


@dataclass(frozen=True, slots=True)
class LambPart:
    """One call of the op."""

    batch: Entries
    lists: Sequence[list[torch.Tensor]]  # parameters, gradients and moments
    rule: LambRule
    update: Update


def apply_lamb(parts: Sequence[LambPart], ops: Ops, splits: Splits) -> None:
    """Update all parts, with the norms of whole tensors where ranks hold parts of them."""

    def measure(place: int) -> torch.Tensor:
        part = parts[place]
        return ops.lamb_norms(*part.lists, rule=part.rule, update=part.update)

    norms = norms_of_wholes([part.batch for part in parts], measure, splits)
    for part, own in zip(parts, norms, strict=True):
        update = part.update if own is None else replace(part.update, norms=own)
        ops.update_(*part.lists, rule=part.rule, update=update)
        part.batch.note_written()


def lamb_rule(group: Group, *, decoupled: bool, use_nvlamb: bool) -> LambRule:
    """The rule of a group."""
    return LambRule(
        lr=rate_of(group),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=decoupled,
        bias_correction=group["bias_correction"],
        grad_averaging=group["grad_averaging"],
        uses_trust_ratio=use_nvlamb or group["weight_decay"] != 0,
    )
