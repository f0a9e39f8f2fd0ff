# SPDX-License-Identifier: BSD-3-Clause
"""The op table: what every back end computes, and in which precision.

A back end is a class of `Ops` in a package under ``preamp.kernels``. Ops are stateless arithmetic
on lists of tensors; none of them waits for a device. The back end ``plain`` is the definition:
the others agree with it bitwise, or within the ulps stated here.

Precision contract, for every op: load in the tensor's own dtype, compute in float32 (float64 for
float64 tensors), round once, to nearest even, on store. No autograd history is recorded.

All update rules (`preamp.kernels.rules`) are one op, ``update_(params, grads, *state, rule=...,
update=...)``. What holds for all of them:

* Lists are equally long; the tensors of one list share dtype and device, those of one place share
  shape. Layouts may differ. Gradients and state may have another dtype than the parameters; the
  parameter's decides between float32 and float64.
* Parameters, state and ``update.halves`` are mutated. Gradients never are.
* Half weights beside wider parameters are the truth, which these refine: an update starts from
  `preamp.kernels.stored.taken_over` (unless ``update.halves_lead`` says otherwise).
* `Update` says what ``inv_scale``, ``found_inf`` and ``halves`` do. A gradient that is not finite
  spoils its own tensors only; skipping is ``found_inf``'s business.

Norms have the precision of sums. Back ends agree with ``plain`` within 4 ulps, in the stored
dtype, of the sum's largest term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch

from preamp.kernels.plans import Column as Column
from preamp.kernels.plans import Tensors as Tensors
from preamp.kernels.plans import check_lengths
from preamp.kernels.rules import Rule
from preamp.kernels.update import Scalar, Update
from preamp.kernels.vectors import LONG, stack

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


@dataclass(frozen=True, slots=True)
class Census:
    """What one read of the gradients tells."""

    found_inf: torch.Tensor  # float32 scalar, 1.0 if any value is infinite or nan, else 0.0
    # float32 scalar, L2 norm over all gradients, if it was asked for
    norm: torch.Tensor | None = None
    # float32, shape ``(n,)``: largest magnitude per tensor, in the order given; nan or inf marks
    # the tensors that are not finite. May be ``None`` where a norm tells that all are.
    max_abs: torch.Tensor | None = None


class Ops(ABC):
    """What a back end provides. No op waits for a device."""

    name: str

    @abstractmethod
    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        """Read every gradient, of any dtype, layout and device, once.

        Overflow is decided by the largest magnitude, never by a sum: the float32 sum of finite
        values can overflow. Empty tensors count as zeros. Sparse tensors are judged by their
        values. The result lies on ``device``. Mutates nothing.

        ``with_norm`` takes the norm of `l2norm` along, without factors.
        """

    def scale_add_(self, grads: Tensors, factor: Scalar, addends: Column) -> None:
        """``grad = grad * factor + addend`` in place, for each pair; no addend means zero.

        The factor is a float32 scalar, an addend of its gradient's dtype.
        """
        self.axpby_(grads, factor, grads, 1.0, addends)

    @abstractmethod
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        """Return ``float32(half) * factor + addend`` for each triple, with a float32 scalar each.

        Addends, float32 accumulators or ``None``, may be overwritten with the result.
        """

    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        """``target = source`` rounded to the target's dtype, for each pair; mutates targets."""
        self.axpby_(targets, 1.0, sources, 0.0, [None] * len(targets))

    @abstractmethod
    def take_over_(self, masters: Tensors, halves: Tensors) -> None:
        """Let masters say what their half weights do, for each pair; mutates masters.

        Elements that round to the half weight bit for bit stay, see
        `preamp.kernels.stored.taken_over`; the others get its value. Masters are float32 or
        float64.
        """

    @abstractmethod
    def split_(self, wides: Tensors, halves: Tensors, lows: Column) -> None:
        """Split float32 values into half ones and the int16 beside these; mutates both.

        See `preamp.kernels.stored`. Without lows, halves alone are rounded, ties away from zero.
        """

    @abstractmethod
    def join_(self, halves: Tensors, lows: Tensors, wides: Tensors) -> None:
        """Write the float32 values that `split_` has made the others of; mutates ``wides``."""

    @abstractmethod
    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        """``target = a * x + b * y``, for each triple; no ``y`` means ``a * x``.

        Products are rounded to float32 (float64 for a float64 tensor), their sum to the wider of
        the two, and then once to the target's dtype. All may have any dense floating dtype, and a
        target may be its ``x`` or ``y``, but not overlap them in part. One that is its ``x`` may
        be sparse, as may its ``y``. Factors are numbers, or float32 scalars on the device; 1.0
        without a ``y`` copies.
        """

    @abstractmethod
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """Return the float32 L2 norm of each ``tensor * factor``, shape ``(n,)`` on ``device``.

        The factor is applied before squaring, so a loss scale that it removes cannot overflow
        the sum. No factor means 1.
        """

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        """Return the float32 L2 norm over all ``tensor * factor``, a scalar on ``device``.

        Norms are per tensor first, then of the norms, as ``torch.nn.utils.clip_grad_norm_``
        does. float16 values cannot overflow it; float32 values above about 1e19 can.
        """
        check_lengths(tensors, factors)
        norms = self.l2norms(tensors, None, device)
        if not all(map(is_, factors, repeat(factors[0] if factors else None))):
            distinct = dict(zip(map(id, factors), factors, strict=True))
            near = {key: _number(by, device) for key, by in distinct.items()}
            norms = norms * stack([near[id(by)] for by in factors])
        elif factors and factors[0] is not None:  # as a rule: one backward, one factor
            norms = norms * _number(factors[0], device)
        # Of many torch adds up the squares one after the other on a CPU, see `vectors.norm`.
        is_long = norms.numel() > LONG and norms.device.type == "cpu"
        wide = torch.float64 if is_long else None
        return _vector_norm(norms, 2, dtype=wide).to(torch.float32)

    @abstractmethod
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        """Update ``params`` by ``rule``; see the top of this file.

        Args:
            params: Mutated.
            grads: Their gradients, not mutated.
            state: The lists that the rule names, in that order; mutated.
            rule: Formula and hyper-parameters.
            update: What differs from step to step.

        Raises:
            ValueError: Lists or shapes differ. Nothing was changed.
        """


def _number(factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A factor on a device; one on the host is read, which waits for nothing."""
    if factor is None or (factor.device.type == "cpu" and device.type != "cpu"):
        value = 1.0 if factor is None else factor.item()
        return torch.full((), value, dtype=torch.float32, device=device)
    return factor.to(device, torch.float32).reshape(())


OP_NAMES = tuple(sorted(Ops.__abstractmethods__))
"""Every op that a back end must have; without one of them it cannot be instantiated."""
