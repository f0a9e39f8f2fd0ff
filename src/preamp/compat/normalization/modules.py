# SPDX-License-Identifier: BSD-3-Clause
"""The layers of ``apex.normalization``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from preamp.compat.normalization.functions import Norm, as_shape, norm_of, normalize
from preamp.core.errors import bad_state, with_article


class _LastDimensionsNorm(nn.Module):
    """What the four layers share; they differ in three facts."""

    _is_centred: bool
    _is_mixed: bool
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        elementwise_affine: bool,
        memory_efficient: bool,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(as_shape(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        self._norm()  # which refuses what cannot be had
        for name in ("weight", "bias") if self._is_centred else ("weight",):
            values = torch.empty(self.normalized_shape) if elementwise_affine else None
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weights to one and biases to zero."""
        for name, param in self.named_parameters(recurse=False):
            nn.init.constant_(param, 1.0 if name == "weight" else 0.0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` of shape ``(…, *normalized_shape)``."""
        bias = self.bias if self._is_centred else None
        return normalize(self._norm(), input, self.weight, bias)

    def _norm(self) -> Norm:
        # Here and not in __init__: scripts set eps on a layer that is there
        kind = {"is_centred": self._is_centred, "is_mixed": self._is_mixed}
        return norm_of(tuple(self.normalized_shape), self.eps, self.memory_efficient, **kind)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse what ``torch.jit.script`` asks for."""
        raise bad_state(
            f"torch.jit.script was given {with_article(type(self).__name__)}",
            "These layers run as they are, traced, and under torch.compile",
            "Use torch.compile, or torch.nn.LayerNorm and torch.nn.RMSNorm in the model to script",
        )

    def extra_repr(self) -> str:
        """Name the arguments."""
        return (
            f"{tuple(self.normalized_shape)}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}"
        )


class _FusedNorm(_LastDimensionsNorm):
    """A layer whose output has the input's dtype."""

    _is_mixed = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            normalized_shape: The last dimensions of the input, or the last one.
            eps: Added to the variance, or to the mean square.
            elementwise_affine: Whether there are ``weight`` and, in a layer norm, ``bias``.
            memory_efficient: Must be false.

        Raises:
            PreampUnavailableError: ``memory_efficient`` is true.
        """
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient)


class _MixedNorm(_LastDimensionsNorm):
    """A layer whose output has the weight's dtype."""

    _is_mixed = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool | None = None,
    ) -> None:
        """Make the layer, which always has its parameters.

        Args:
            normalized_shape: The last dimensions of the input, or the last one.
            eps: Added to the variance, or to the mean square.
            memory_efficient: Must be false.
            elementwise_affine: Superfluous; True warns.

        Raises:
            PreampStateError: ``elementwise_affine`` is False; a ``RuntimeError``.
            PreampUnavailableError: ``memory_efficient`` is true.
        """
        name = type(self).__name__
        if elementwise_affine:
            warnings.warn(f"{name} always has a weight: leave elementwise_affine out", stacklevel=2)
        elif elementwise_affine is not None:
            raise bad_state(
                f"{name} was given elementwise_affine=False",
                "Its output has the dtype of its weight, so it always has one",
                f"Use {name.removeprefix('Mixed')} for a norm without weight",
            )
        super().__init__(normalized_shape, eps, True, memory_efficient)


class FusedLayerNorm(_FusedNorm):
    """Layer norm over the last dimensions; the output has the input's dtype.

    ``(x - mean) / sqrt(var + eps) · weight + bias`` with the biased variance. Statistics are in
    float32, or float64. Under autocast, input and parameters are cast to its dtype, where torch's
    own layer norm would go to float32. Ba, Kiros and Hinton, 2016, arXiv:1607.06450.
    """

    _is_centred = True


class FusedRMSNorm(_FusedNorm):
    """RMS norm over the last dimensions; the output has the input's dtype.

    ``x / sqrt(mean(x²) + eps) · weight``. Statistics are in float32, or float64. Under autocast,
    input and weight are cast to its dtype. Zhang and Sennrich, 2019, arXiv:1910.07467.
    """

    _is_centred = False


class MixedFusedLayerNorm(_MixedNorm):
    """`FusedLayerNorm` whose output has the weight's dtype, whatever the input's."""

    _is_centred = True


class MixedFusedRMSNorm(_MixedNorm):
    """`FusedRMSNorm` whose output has the weight's dtype, whatever the input's."""

    _is_centred = False
