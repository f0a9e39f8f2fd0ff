# SPDX-License-Identifier: BSD-3-Clause
"""The update rules: their formulas, their hyper-parameters, and what one update is told besides.

A rule says which formula is meant and with which numbers; it is the same for every tensor of a
call. What differs from step to step is an `Update`. Both are plain records that every back end
reads in the same way. In formulas ``p`` is the parameter and ``g = grad * inv_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NoReturn

import torch

from preamp.core.errors import worded
from preamp.kernels.stored import Stored

Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor that a back end reads on the device, without synchronising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update is told besides its rule and its tensors; the same for every rule."""

    # Number of this update, counted from 1, for bias corrections and first-run cases. A 0-dim
    # integer tensor is read on the device. The caller owns and advances it; where ``found_inf``
    # may be set it advances a tensor only if it is not.
    step: int | torch.Tensor = 1
    # float32 scalar (or float64, for float64 tensors) that every gradient is multiplied by after
    # widening. Gradients themselves are never written.
    inv_scale: torch.Tensor | None = None
    # float32 scalar. Anything but zero makes the whole update a no-op: parameters, state and
    # halves keep every bit. Decided on the device.
    found_inf: torch.Tensor | None = None
    # For each parameter a tensor that gets the new value rounded to its own dtype, or ``None``.
    # Always rounded from the parameter as stored, so that a half weight equals its rounded master
    # bitwise.
    halves: Sequence[torch.Tensor | None] | None = None
    # The norms that the rule needs, shape ``(k, n)``, in place of those of the tensors given:
    # these are parts of larger ones. ``|p|`` and ``|u|`` for LAMB, ``|p|`` and ``|g|`` for LARS,
    # that of the gradient for NovoGrad. Other rules ignore it.
    norms: torch.Tensor | None = None
    # How lists are kept that are no plain tensors; `preamp.kernels.stored` defines the formats.
    # Parameters with an int16 tensor beside them are half tensors, and ``halves`` is not given.
    stored: Stored | None = None

    def at(self, places: Sequence[int]) -> Update:
        """What is told of the tensors at ``places`` alone."""
        halves = None if self.halves is None else [self.halves[place] for place in places]
        stored = None if self.stored is None else self.stored.at(places)
        return replace(self, halves=halves, norms=norms_at(self.norms, places), stored=stored)


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
    """

    NONE = "none"  # nowhere
    # ``m / c1`` and ``v / c2``, as in the algorithm of the paper; eps is added to the corrected
    # root
    MOMENTS = "moments"
    # ``lr * sqrt(c2) / c1``, the paper's cheaper form at the end of its section 2; eps is added
    # to the raw root, and decoupled decay is scaled along
    STEP_SIZE = "step_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyRule:
    """What every rule has."""

    lr: Scalar  # learning rate
    weight_decay: float
    # whether the last list of its state has a 0-dim tensor for each parameter
    has_numbers: ClassVar[bool] = False
    leaves_state: ClassVar[bool] = False  # whether it neither reads nor writes its state


@dataclass(frozen=True, slots=True, kw_only=True)
class _MomentsRule(_AnyRule):
    """What rules with two moments have."""

    beta1: float  # decay of the first moment
    beta2: float  # decay of the second moment, or of the norm
    eps: float  # added to the denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule(_MomentsRule):
    """Adam and AdamW; state ``exp_avgs``, ``exp_avg_sqs``.

    ``g += weight_decay * p`` unless decoupled; ``m = beta1 * m + (1 - beta1) * g``;
    ``v = beta2 * v + (1 - beta2) * g * g``;
    ``p -= size * (m' / (sqrt(v') + eps) + weight_decay * p)``, the last term if decoupled.
    `BiasCorrection` says what ``size``, ``m'`` and ``v'`` are; ``sqrt(v' + eps)`` replaces
    the denominator if ``eps_inside_sqrt``.

    Source: Kingma and Ba, "Adam" (arXiv:1412.6980); Loshchilov and Hutter, "Decoupled Weight
    Decay Regularization" (arXiv:1711.05101).
    """

    decoupled: bool  # decay the parameter (AdamW) rather than add the decay to the gradient
    bias_correction: BiasCorrection  # where moments are corrected
    eps_inside_sqrt: bool = False  # add eps to the second moment rather than to its root


@dataclass(frozen=True, slots=True, kw_only=True)
class LambRule(_MomentsRule):
    """LAMB; state ``exp_avgs``, ``exp_avg_sqs``. A global norm clips through ``inv_scale``.

    Moments as in `AdamRule`, with ``beta3 = 1 - beta1`` or 1 in front of ``g``;
    ``u = m' / (sqrt(v') + eps) + weight_decay * p``, the last term if decoupled;
    ``p -= lr * |p| / |u| * u`` per tensor, with ``lr`` alone where a norm is zero or the
    rule has no trust ratio. ``|p|`` is the norm before the update.

    Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv:1904.00962).
    """

    decoupled: bool  # add the decay to the update (AdamW) rather than to the gradient
    bias_correction: bool  # divide the moments by ``1 - beta**step``
    grad_averaging: bool  # weigh a new gradient by ``1 - beta1`` rather than by 1
    uses_trust_ratio: bool  # scale each tensor's step by the ratio of its norms


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule(_AnyRule):
    """Gradient descent with momentum; state ``momentum_buffers``.

    ``g += weight_decay * p``; ``m = momentum * m + (1 - dampening) * g``, or ``m = g`` at
    step 1; ``g + momentum * m`` replaces ``g`` with nesterov, ``m`` without; ``p -= lr * g``.
    Decay comes after momentum if the rule says so. Without momentum buffers are not touched.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep
    learning" (ICML 2013), in torch's form, where lr scales the momentum as a whole.
    """

    momentum: float  # decay of the momentum; 0 for none
    dampening: float  # A new gradient enters the momentum with weight ``1 - dampening``
    nesterov: bool  # look ahead along the momentum
    decays_after_momentum: bool = False  # add the decay after the momentum rather than before

    @property
    def leaves_state(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Without momentum there is none."""
        return self.momentum == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NovoGradRule(_MomentsRule):
    """NovoGrad: Adam with one second moment per tensor, kept as a norm.

    State ``exp_avgs``, ``norms``. With ``n`` the norm of ``g``:
    ``v = sqrt(beta2 * v**2 + (1 - beta2) * n**2)``, or
    ``v = beta2 * v + (1 - beta2) * n`` for the largest magnitude; ``v = n`` where the old
    ``v`` is negative, which means that there is none yet. ``d = v / sqrt(c2) + eps``.
    Inside the moment: ``g = g / d + weight_decay * p``, ``m = beta1 * m + beta3 * g``,
    ``p -= lr * m / c1``. Outside: ``m = beta1 * m + beta3 * g``,
    ``p -= lr * (m / c1 / d + weight_decay * p)``. ``c1``, ``c2`` and ``beta3`` as in
    `LambRule`.

    Source: Ginsburg et al., "Training Deep Networks with Stochastic Normalized Gradient
    Descent" (arXiv:1905.11286).
    """

    bias_correction: bool  # correct moment and norm for the number of steps
    grad_averaging: bool  # weigh a new gradient by ``1 - beta1`` rather than by 1
    # normalise the gradient and add the decay before the moment rather than after
    decays_inside_moment: bool
    uses_max_norm: bool  # take the largest magnitude of a gradient rather than its L2 norm
    has_numbers: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradRule(_AnyRule):
    """Adagrad; state ``sums``.

    ``g += weight_decay * p`` unless decoupled; ``h += g * g``;
    ``p -= lr * (g / (sqrt(h) + eps) + weight_decay * p)``, the last term if decoupled.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (JMLR 12, 2011).
    """

    eps: float  # added to the denominator
    decoupled: bool  # decay the parameter rather than add the decay to the gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsRule(_AnyRule):
    """LARS, with the learning rate inside the momentum; state ``momentum_buffers``.

    ``s = lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`` per tensor, or
    ``lr`` where a norm is zero or the rule has no trust ratio; ``g += weight_decay * p``;
    ``m = momentum * m - s * g``; ``p += m``, with nesterov ``p += momentum * m - s * g``.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks"
    (arXiv:1708.03888).
    """

    momentum: float  # decay of the momentum
    nesterov: bool  # look ahead along the momentum
    trust_coefficient: float  # factor of the trust ratio
    eps: float  # added to the denominator of the trust ratio
    uses_trust_ratio: bool  # scale each tensor's step by the ratio of its norms


Rule = AdamRule | LambRule | SgdRule | NovoGradRule | AdagradRule | LarsRule
"""Every rule that back ends know: the type checker names those that a back end leaves out."""


def left_out(rule: NoReturn) -> NoReturn:
    """Refuse a rule that a back end has no formula or kernel for; for the end of a ``match``."""
    raise worded(
        NotImplementedError,
        f"There is no formula or kernel for {type(rule).__name__} here",
        "Every back end has all rules of preamp.kernels.rules.Rule",
        "Add it where this was raised; docs/design.md lists the places",
    )
