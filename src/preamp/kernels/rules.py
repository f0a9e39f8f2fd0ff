# SPDX-License-Identifier: BSD-3-Clause
# pyright: basic
"""The update rules: of each its hyper-parameters, its formula, and what it tells the formula.

A rule is a plain record that says which formula is meant and with which numbers; it is the same for
every tensor of a call. What differs from step to step is a `preamp.kernels.update.Update`.

A formula is a plain function of the values of one element: the parameter ``p``, the gradient ``g``
times ``inv_scale``, the state ``m`` and ``v``, then numbers, then options in capitals. torch runs
it on whole tensors, numba and Triton compile it into their kernels. What is written differently
there stands in it as a name that `bind` fills in: `root`, `divide`, `corrected` and `choose`. Every
operation is rounded on its own, in the order in which it is written.

A rule with one list of state has one formula, which returns the new parameter and state. One with
two has the new state, then the step, of which the parameter loses ``size`` times as much. By name a
formula gets what ``terms`` says, and of the update what it asks for:

- ``size``: the learning rate, or what the rule makes of it for the tensor or the step;
- ``c1``, ``c2``: the bias corrections of the moments; ``denominator``: NovoGrad's, of the tensor;
- ``is_first``: whether it is update 1.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from preamp.core.errors import worded
from preamp.kernels.update import Scalar

root: Any = None  # the square root, correctly rounded
divide: Any = None  # the quotient, correctly rounded
corrected: Any = None  # a moment without the bias that its correction stands for
choose: Any = None  # one of two values, by a condition

Formula = Callable[..., Any]
Terms = tuple[dict[str, float], dict[str, bool]]
"""Numbers and options of a formula, by name."""


def bind(formula: Callable[..., Any], **words: Any) -> Any:
    """Return ``formula`` with a back end's ``words`` for `root`, `divide` and the others."""
    bound = types.FunctionType(formula.__code__, {**formula.__globals__, **words}, formula.__name__)
    bound.__module__, bound.__qualname__ = formula.__module__, formula.__qualname__
    return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """What every rule has."""

    lr: Scalar  # learning rate
    weight_decay: float
    formulas: ClassVar[tuple[Formula, ...]]
    # whether the last list of its state has a 0-dim tensor for each parameter
    has_numbers: ClassVar[bool] = False

    @property
    def leaves_state(self) -> bool:
        """Whether it neither reads nor writes its state."""
        return False

    @property
    def corrects(self) -> bool:
        """Whether it makes up for moments that start at zero."""
        return bool(getattr(self, "bias_correction", False))

    @property
    def takes_norms(self) -> bool:
        """Whether it needs norms of whole tensors: for numbers of their own, or a trust ratio."""
        return self.has_numbers or bool(getattr(self, "uses_trust_ratio", False))

    @property
    @abstractmethod
    def terms(self) -> Terms:
        """What its formulas are passed, whatever the update."""

    def _terms(self, *, decoupled: bool | None = None, **given: float | bool) -> Terms:
        """Numbers and options of ``given``, with those of the weight decay."""
        given["decay"] = self.weight_decay
        if decoupled is not None:
            decays = self.weight_decay != 0
            given |= {"COUPLED": decays and not decoupled, "DECOUPLED": decays and decoupled}
        numbers = {name: value for name, value in given.items() if not name.isupper()}
        return numbers, {name: bool(value) for name, value in given.items() if name.isupper()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MomentsRule(Rule):
    """What rules with two moments have."""

    beta1: float  # decay of the first moment
    beta2: float  # decay of the second moment, or of the norm
    eps: float  # added to the denominator

    def _moment_terms(self, *, averages: bool = True, **given: Any) -> Terms:
        """`_terms` of a rule whose state is two moments; a gradient ``averages`` into the first."""
        return self._terms(
            beta1=self.beta1,
            share=1 - self.beta1 if averages else 1.0,
            beta2=self.beta2,
            rest=1 - self.beta2,
            eps=self.eps,
            **given,
        )


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


def moments(p, g, m, v, beta1, share, beta2, rest, decay, COUPLED):
    """The new moments of `AdamRule` and `LambRule`."""
    if COUPLED:
        g = g + decay * p
    m = beta1 * m + share * g
    v = beta2 * v + rest * g * g
    return m, v


def direction(p, m, v, c1, c2, eps, decay, DECOUPLED, CORRECTED, EPS_INSIDE):
    """The step of `AdamRule` and `LambRule` before its size, from the new moments."""
    if CORRECTED:
        m = corrected(m, c1)
        v = corrected(v, c2)
    if EPS_INSIDE:
        v = v + eps
    denominator = root(v)
    if not EPS_INSIDE:
        denominator = denominator + eps
    u = divide(m, denominator)
    if DECOUPLED:
        u = u + decay * p
    return u


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
    formulas: ClassVar = (moments, direction)

    @property
    def corrects(self) -> bool:
        """As `BiasCorrection` says."""
        return self.bias_correction is not BiasCorrection.NONE

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        return self._moment_terms(
            decoupled=self.decoupled,
            CORRECTED=self.bias_correction is BiasCorrection.MOMENTS,
            EPS_INSIDE=self.eps_inside_sqrt,
        )


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
    formulas: ClassVar = (moments, direction)

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        return self._moment_terms(
            averages=self.grad_averaging,
            decoupled=self.decoupled,
            CORRECTED=self.bias_correction,
            EPS_INSIDE=False,
        )


def sgd(p, g, m, size, is_first, momentum, share, decay, HAS_MOMENTUM, NESTEROV, BEFORE, AFTER):
    """The new parameter and momentum of `SgdRule`; without momentum ``m`` is returned as it is."""
    if BEFORE:
        g = g + decay * p
    if HAS_MOMENTUM:
        later = momentum * m + share * g
        m = choose(is_first, g, later)
        if NESTEROV:
            g = g + momentum * m
        else:
            g = m
    if AFTER:
        g = g + decay * p
    return p - size * g, m


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule(Rule):
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
    formulas: ClassVar = (sgd,)

    @property
    def leaves_state(self) -> bool:
        """Without momentum there is none."""
        return self.momentum == 0

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        decays = self.weight_decay != 0
        return self._terms(
            momentum=self.momentum,
            share=1 - self.dampening,
            HAS_MOMENTUM=self.momentum != 0,
            NESTEROV=self.nesterov,
            BEFORE=decays and not self.decays_after_momentum,
            AFTER=decays and self.decays_after_momentum,
        )


def novograd(p, g, m, denominator, size, c1, beta1, share, decay, INSIDE):
    """The new parameter and moment of `NovoGradRule`; ``denominator`` is the tensor's own."""
    if INSIDE:
        g = divide(g, denominator) + decay * p
    m = beta1 * m + share * g
    u = corrected(m, c1)
    if not INSIDE:
        u = divide(u, denominator) + decay * p
    return p - size * u, m


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
    formulas: ClassVar = (novograd,)
    has_numbers: ClassVar[bool] = True

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        share = 1 - self.beta1 if self.grad_averaging else 1.0
        return self._terms(beta1=self.beta1, share=share, INSIDE=self.decays_inside_moment)


def adagrad(p, g, m, size, eps, decay, COUPLED, DECOUPLED):
    """The new parameter and sum of `AdagradRule`."""
    if COUPLED:
        g = g + decay * p
    m = m + g * g
    u = divide(g, root(m) + eps)
    if DECOUPLED:
        u = u + decay * p
    return p - size * u, m


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradRule(Rule):
    """Adagrad; state ``sums``.

    ``g += weight_decay * p`` unless decoupled; ``h += g * g``;
    ``p -= lr * (g / (sqrt(h) + eps) + weight_decay * p)``, the last term if decoupled.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (JMLR 12, 2011).
    """

    eps: float  # added to the denominator
    decoupled: bool  # decay the parameter rather than add the decay to the gradient
    formulas: ClassVar = (adagrad,)

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        return self._terms(eps=self.eps, decoupled=self.decoupled)


def lars(p, g, m, size, momentum, decay, NESTEROV):
    """The new parameter and momentum of `LarsRule`; ``size`` is the tensor's own."""
    change = size * (g + decay * p)
    m = momentum * m - change
    step = m
    if NESTEROV:
        step = momentum * m - change
    return p + step, m


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsRule(Rule):
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
    formulas: ClassVar = (lars,)

    @property
    def terms(self) -> Terms:
        """See `Rule.terms`."""
        return self._terms(momentum=self.momentum, NESTEROV=self.nesterov)


RULES: tuple[type[Rule], ...] = (AdamRule, LambRule, SgdRule, NovoGradRule, AdagradRule, LarsRule)
"""Every rule that back ends know."""


def bound_formulas(make: Callable[[Formula], Any], **words: Any) -> dict[Formula, Any]:
    """What ``make`` makes of every formula with a back end's ``words``, by the formula."""
    every = dict.fromkeys(formula for rule in RULES for formula in rule.formulas)
    return {formula: make(bind(formula, **words)) for formula in every}


def check_known(rule: Rule) -> None:
    """Refuse a rule that is not in `RULES`, whose formulas no back end has bound."""
    if type(rule) not in RULES:
        raise worded(
            NotImplementedError,
            f"There is no kernel for {type(rule).__name__} here",
            "Every back end has all rules of preamp.kernels.rules.RULES",
            "Add it there and to the back ends; docs/design.md lists the places",
        )
