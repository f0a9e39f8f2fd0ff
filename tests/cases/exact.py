# SPDX-License-Identifier: BSD-3-Clause
"""Float64 values that know how large the terms were that they are sums of.

What a computation in less precision may be off by is proportional to its terms, not to its result:
where terms cancel, the result is small and the error is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Exact:
    """A value, and what it would be without cancellation.

    Attributes:
        value: float64.
        size: float64, at least the magnitude of ``value``.
    """

    value: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Exact:
        """A tensor as it is stored."""
        return cls(tensor.detach().double(), tensor.detach().double().abs())

    def __add__(self, other: Exact | float) -> Exact:
        other = _exact(other)
        return Exact(self.value + other.value, self.size + other.size)

    def __sub__(self, other: Exact) -> Exact:
        return Exact(self.value - other.value, self.size + other.size)

    def __mul__(self, other: Exact | float) -> Exact:
        other = _exact(other)
        return Exact(self.value * other.value, self.size * other.size)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Exact | float) -> Exact:
        other = _exact(other)
        return Exact(self.value / other.value, self.size * other.size / other.value.square())

    def sqrt(self) -> Exact:
        root = self.value.sqrt()
        return Exact(root, torch.where(self.value > 0, self.size / root, self.size.sqrt()))

    def norm(self) -> Exact:
        """L2 norm; its terms are squares, which do not cancel."""
        return Exact(self.value.square().sum(), self.size.square().sum()).sqrt()

    def largest(self) -> Exact:
        """Largest magnitude; zero of nothing."""
        if self.value.numel() == 0:
            return Exact.of(torch.zeros(()))
        return Exact(self.value.abs().max(), self.size.max())


def _exact(other: Exact | float) -> Exact:
    return other if isinstance(other, Exact) else Exact.of(torch.tensor(other, dtype=torch.float64))


def where(condition: torch.Tensor, a: Exact, b: Exact) -> Exact:
    return Exact(torch.where(condition, a.value, b.value), torch.where(condition, a.size, b.size))


def assert_within_ulps(
    ours: torch.Tensor, wanted: Exact, ulps: float, *, computed: torch.dtype, where: str = ""
) -> None:
    """``ours`` is off by no more than some ulps of the size of its terms.

    Of its own dtype, or of that it was ``computed`` in, whichever is the coarser.
    """
    info = torch.finfo(ours.dtype)
    eps = max(info.eps, torch.finfo(computed).eps)
    # Below its normal range a float keeps no digits; beyond its range it is infinite.
    allowed = ulps * (wanted.size * eps).clamp(min=info.tiny * info.eps)
    wide = ours.detach().double()
    fits = wanted.value.abs() + allowed < info.max
    assert ((wide - wanted.value).abs() <= allowed)[fits].all(), f"{where}: {ours}, {wanted}"
    overflows = wanted.value.abs() - allowed > info.max
    assert wide[overflows].isinf().all(), where
