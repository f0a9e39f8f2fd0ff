# SPDX-License-Identifier: BSD-3-Clause
"""The op table: what every back end computes, and in which precision.

A back end is a module under ``preamp.kernels`` with one function per op. Ops are stateless
arithmetic on lists of tensors; none of them reads a value back to the host. The reference back
end is the definition: the others agree with it bitwise, or within the ulps stated here.

Precision contract, for every op: load in the tensor's own dtype, compute in float32 (float64 for
float64 tensors), round once, to nearest even, on store. No autograd history is recorded.

The update rules (``adam_`` and below) have one signature:
``op(params, grads, *state, rule=..., update=...)``. What holds for all of them:

* Lists are equally long; the tensors of one list share dtype and device, those of one place share
  shape. Layouts may differ. Gradients and state may have another dtype than the parameters; the
  parameter's decides between float32 and float64.
* Parameters, state and ``update.halves`` are mutated. Gradients never are.
* `Update` says what ``inv_scale``, ``found_inf`` and ``halves`` do. A gradient that is not finite
  spoils its own tensors only; skipping is ``found_inf``'s business.

In formulas ``p`` is the parameter, ``g = grad * inv_scale``; norms have the precision of sums.
Back ends agree with the reference within 4 ulps, in the stored dtype, of the sum's largest term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    LambRule,
    LarsRule,
    NovoGradRule,
    SgdRule,
    Update,
)

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Census:
    """What one read of the gradients tells.

    Attributes:
        found_inf: float32 scalar, 1.0 if any value is infinite or nan, else 0.0.
        norm: float32 scalar, L2 norm over all gradients, if it was asked for.
        max_abs: float32, shape ``(n,)``: largest magnitude per tensor, in the order given;
            nan or inf marks the tensors that are not finite. May be ``None`` if it was not asked
            for and nothing was found.
        max_finite: float32, shape ``(n,)``: largest finite magnitude per tensor, 0 if there is
            none, nan where it was not looked for. ``None`` from back ends for which it would cost
            another pass.
    """

    found_inf: torch.Tensor
    norm: torch.Tensor | None = None
    max_abs: torch.Tensor | None = None
    max_finite: torch.Tensor | None = None


class Ops(Protocol):
    """The functions a back end provides. None synchronises with the host."""

    name: str

    def census(
        self,
        grads: Tensors,
        device: torch.device,
        *,
        with_norm: bool = False,
        with_max_abs: bool = True,
    ) -> Census:
        """Read every gradient once.

        Overflow is decided by the largest magnitude, never by a sum: the float32 sum of finite
        values can overflow. Empty tensors count as zeros. Sparse tensors are judged by their
        values. The result lies on ``device``. Mutates nothing.

        Args:
            grads: Gradients of any dtype, layout and device.
            device: Where the results go.
            with_norm: Take the norm of `l2norm` along, without factors.
            with_max_abs: Look for the largest magnitudes even where all is finite. Neither costs
                a GPU anything, but a CPU computes less without.
        """
        ...

    def scale_add_(
        self, grads: Tensors, factor: torch.Tensor | float, addends: Sequence[torch.Tensor | None]
    ) -> None:
        """``grad = grad * factor + addend`` in place, for each pair; no addend means zero.

        Args:
            grads: Mutated; any floating dtype, dense or sparse.
            factor: float32 scalar.
            addends: Same dtype and shape as their gradient, or ``None``.
        """
        ...

    def widen_add(
        self,
        halves: Tensors,
        factors: Sequence[torch.Tensor],
        addends: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Return ``float32(half) * factor + addend`` for each triple.

        Args:
            halves: Half gradients; not mutated.
            factors: One float32 scalar each.
            addends: float32 accumulators that may be overwritten with the result, or ``None``.
        """
        ...

    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        """``target = source`` rounded to the target's dtype, for each pair; mutates targets."""
        ...

    def axpby_(
        self,
        targets: Tensors,
        a: torch.Tensor | float,
        xs: Tensors,
        b: torch.Tensor | float,
        ys: Sequence[torch.Tensor | None],
    ) -> None:
        """``target = a * x + b * y``, for each triple; no ``y`` means ``a * x``.

        Products are rounded to float32 (float64 for a float64 tensor), their sum to the wider of
        the two, and then once to the target's dtype.

        Args:
            targets: Mutated; any dense floating dtype. May be ``x`` or ``y`` itself.
            a: float32 scalar on the tensors' device, or a number.
            xs: Same shapes as the targets, any dense floating dtype.
            b: As ``a``.
            ys: As ``xs``, or ``None``.
        """
        ...

    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """Return the float32 L2 norm of each ``tensor * factor``, shape ``(n,)`` on ``device``.

        The factor is applied before squaring, so a loss scale that it removes cannot overflow
        the sum. No factor means 1.
        """
        ...

    def l2norm(
        self, tensors: Tensors, factors: Sequence[torch.Tensor | None], device: torch.device
    ) -> torch.Tensor:
        """Return the float32 L2 norm over all ``tensor * factor``, a scalar on ``device``.

        Norms are per tensor first, then of the norms, as ``torch.nn.utils.clip_grad_norm_``
        does. float16 values cannot overflow it; float32 values above about 1e19 can.
        """
        ...

    # -- update rules, see the top of this file ------------------------------------------------

    def adam_(
        self,
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        *,
        rule: AdamRule,
        update: Update,
    ) -> None:
        """Adam and AdamW.

        ``g += weight_decay * p`` unless decoupled; ``m = beta1 * m + (1 - beta1) * g``;
        ``v = beta2 * v + (1 - beta2) * g * g``;
        ``p -= size * (m' / (sqrt(v') + eps) + weight_decay * p)``, the last term if decoupled.
        `BiasCorrection` says what ``size``, ``m'`` and ``v'`` are; ``sqrt(v' + eps)`` replaces
        the denominator if ``eps_inside_sqrt``.

        Source: Kingma and Ba, "Adam" (arXiv:1412.6980); Loshchilov and Hutter, "Decoupled Weight
        Decay Regularization" (arXiv:1711.05101).
        """
        ...

    def lamb_(
        self,
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        *,
        rule: LambRule,
        update: Update,
    ) -> None:
        """LAMB; clipping by a global norm enters through ``inv_scale``.

        Moments as in ``adam_``, with ``beta3 = 1 - beta1`` or 1 in front of ``g``;
        ``u = m' / (sqrt(v') + eps) + weight_decay * p``, the last term if decoupled;
        ``p -= lr * |p| / |u| * u`` per tensor, with ``lr`` alone where a norm is zero or the
        rule has no trust ratio. ``|p|`` is the norm before the update.

        Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv:1904.00962).
        """
        ...

    def lamb_norms(self, *lists: Tensors, rule: LambRule, update: Update) -> torch.Tensor:
        """The ``|p|`` and ``|u|`` that ``lamb_`` would take, ``(2, n)``; mutates nothing."""
        ...

    def sgd_(
        self,
        params: Tensors,
        grads: Tensors,
        momentum_buffers: Tensors,
        *,
        rule: SgdRule,
        update: Update,
    ) -> None:
        """Gradient descent with momentum.

        ``g += weight_decay * p``; ``m = momentum * m + (1 - dampening) * g``, or ``m = g`` at
        step 1; ``g + momentum * m`` replaces ``g`` with nesterov, ``m`` without; ``p -= lr * g``.
        Decay comes after momentum if the rule says so. Without momentum buffers are not touched.

        Source: Sutskever et al., "On the importance of initialization and momentum in deep
        learning" (ICML 2013), in torch's form, where lr scales the momentum as a whole.
        """
        ...

    def novograd_(
        self,
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        norms: Tensors,
        *,
        rule: NovoGradRule,
        update: Update,
    ) -> None:
        """NovoGrad: Adam with one second moment per tensor, kept as a norm.

        With ``n`` the norm of ``g``: ``v = sqrt(beta2 * v**2 + (1 - beta2) * n**2)``, or
        ``v = beta2 * v + (1 - beta2) * n`` for the largest magnitude; ``v = n`` where the old
        ``v`` is negative, which means that there is none yet. ``d = v / sqrt(c2) + eps``.
        Inside the moment: ``g = g / d + weight_decay * p``, ``m = beta1 * m + beta3 * g``,
        ``p -= lr * m / c1``. Outside: ``m = beta1 * m + beta3 * g``,
        ``p -= lr * (m / c1 / d + weight_decay * p)``. ``c1``, ``c2`` and ``beta3`` as in
        ``lamb_``; ``norms`` are 0-dim tensors.

        Source: Ginsburg et al., "Training Deep Networks with Stochastic Normalized Gradient
        Descent" (arXiv:1905.11286).
        """
        ...

    def adagrad_(
        self, params: Tensors, grads: Tensors, sums: Tensors, *, rule: AdagradRule, update: Update
    ) -> None:
        """Adagrad.

        ``g += weight_decay * p`` unless decoupled; ``h += g * g``;
        ``p -= lr * (g / (sqrt(h) + eps) + weight_decay * p)``, the last term if decoupled.

        Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (JMLR 12, 2011).
        """
        ...

    def lars_(
        self,
        params: Tensors,
        grads: Tensors,
        momentum_buffers: Tensors,
        *,
        rule: LarsRule,
        update: Update,
    ) -> None:
        """LARS, with the learning rate inside the momentum.

        ``s = lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`` per tensor, or
        ``lr`` where a norm is zero or the rule has no trust ratio; ``g += weight_decay * p``;
        ``m = momentum * m - s * g``; ``p += m``, with nesterov ``p += momentum * m - s * g``.

        Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks"
        (arXiv:1708.03888).
        """
        ...


OP_NAMES = (
    *("census", "scale_add_", "widen_add", "cast_copy_", "axpby_", "l2norms", "l2norm"),
    *("adam_", "lamb_", "lamb_norms", "sgd_", "novograd_", "adagrad_", "lars_"),
)
"""Every op of the table; a back end must have all of them."""
