# SPDX-License-Identifier: BSD-3-Clause
"""Hyper-parameters of the update rules, and what one update is told besides them.

A rule says which formula is meant and with which numbers; it is the same for every tensor of a
call. What differs from step to step is an `Update`. Both are plain records that every back end
reads in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor that a back end reads on the device, without synchronising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update is told besides its rule and its tensors; the same for every rule.

    Attributes:
        step: Number of this update, counted from 1, for bias corrections and first-run cases. A
            0-dim integer tensor is read on the device. The caller owns and advances it; where
            ``found_inf`` may be set it advances a tensor only if it is not.
        inv_scale: float32 scalar (or float64, for float64 tensors) that every gradient is
            multiplied by after widening. Gradients themselves are never written.
        found_inf: float32 scalar. Anything but zero makes the whole update a no-op: parameters,
            state and halves keep every bit. Decided on the device.
        halves: For each parameter a tensor that gets the new value rounded to its own dtype, or
            ``None``. Always rounded from the parameter as stored, so that a half weight equals
            its rounded master bitwise.
        norms: The norms that the rule needs, shape ``(k, n)``, in place of those of the tensors
            given: these are parts of larger ones. ``|p|`` and ``|u|`` for LAMB, ``|p|`` and ``|g|``
            for LARS, that of the gradient for NovoGrad. Other rules ignore it.
    """

    step: int | torch.Tensor = 1
    inv_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    halves: Sequence[torch.Tensor | None] | None = None
    norms: torch.Tensor | None = None

    def at(self, places: Sequence[int]) -> Update:
        """What is told of the tensors at ``places`` alone."""
        halves = None if self.halves is None else [self.halves[place] for place in places]
        return replace(self, halves=halves, norms=norms_at(self.norms, places))


def norms_at(norms: torch.Tensor | None, places: Sequence[int]) -> torch.Tensor | None:
    """The columns of ``norms`` at ``places``; no index, whose upload would be waited for."""
    if norms is None or len(places) == norms.shape[1]:
        return norms
    if not places:
        return norms[:, :0]
    return torch.stack([norms[:, place] for place in places], dim=1)


class BiasCorrection(Enum):
    """Where Adam makes up for moments that start at zero.

    With ``c1 = 1 - beta1**step`` and ``c2 = 1 - beta2**step``:

    Attributes:
        NONE: Nowhere.
        MOMENTS: ``m / c1`` and ``v / c2``, as in the algorithm of the paper; eps is added to the
            corrected root.
        STEP_SIZE: ``lr * sqrt(c2) / c1``, the paper's cheaper form at the end of its section 2;
            eps is added to the raw root, and decoupled decay is scaled along.
    """

    NONE = "none"
    MOMENTS = "moments"
    STEP_SIZE = "step_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule:
    """Hyper-parameters of `Ops.adam_`.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: Decay the parameter (AdamW) rather than add the decay to the gradient.
        bias_correction: Where moments are corrected.
        eps_inside_sqrt: Add eps to the second moment rather than to its root.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: BiasCorrection
    eps_inside_sqrt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LambRule:
    """Hyper-parameters of `Ops.lamb_`.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: Add the decay to the update (AdamW) rather than to the gradient.
        bias_correction: Divide the moments by ``1 - beta**step``.
        grad_averaging: Weigh a new gradient by ``1 - beta1`` rather than by 1.
        uses_trust_ratio: Scale each tensor's step by the ratio of its norms.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    grad_averaging: bool
    uses_trust_ratio: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule:
    """Hyper-parameters of `Ops.sgd_`.

    Attributes:
        lr: Learning rate.
        momentum: Decay of the momentum; 0 for none.
        dampening: A new gradient enters the momentum with weight ``1 - dampening``.
        weight_decay: Weight decay.
        nesterov: Look ahead along the momentum.
        decays_after_momentum: Add the decay after the momentum rather than before.
    """

    lr: Scalar
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    decays_after_momentum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NovoGradRule:
    """Hyper-parameters of `Ops.novograd_`.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the norm.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        bias_correction: Correct moment and norm for the number of steps.
        grad_averaging: Weigh a new gradient by ``1 - beta1`` rather than by 1.
        decays_inside_moment: Normalise the gradient and add the decay before the moment rather
            than after.
        uses_max_norm: Take the largest magnitude of a gradient rather than its L2 norm.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool
    decays_inside_moment: bool
    uses_max_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradRule:
    """Hyper-parameters of `Ops.adagrad_`.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: Decay the parameter rather than add the decay to the gradient.
    """

    lr: Scalar
    eps: float
    weight_decay: float
    decoupled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsRule:
    """Hyper-parameters of `Ops.lars_`.

    Attributes:
        lr: Learning rate.
        momentum: Decay of the momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Look ahead along the momentum.
        trust_coefficient: Factor of the trust ratio.
        eps: Added to the denominator of the trust ratio.
        uses_trust_ratio: Scale each tensor's step by the ratio of its norms.
    """

    lr: Scalar
    momentum: float
    weight_decay: float
    nesterov: bool
    trust_coefficient: float
    eps: float
    uses_trust_ratio: bool
