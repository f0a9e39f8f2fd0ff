# SPDX-License-Identifier: BSD-3-Clause
"""What scripts take for the ``autograd.Function`` classes of ``fused_layer_norm``.

They call ``apply`` with positional arguments. As in Apex nothing is cast under autocast and ``eps``
has no default; the functions of ``functions.py`` cast.
"""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.normalization.functions import Shape, in_torch, norm_of
from preamp.core.dtypes import is_half, math_dtype


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return the RMS norm by plain operations, as Apex computed it without its extension.

    Args:
        input: Shape ``(…, *normalized_shape)``; the mean square is in float32.
        normalized_shape: The dimensions to normalise over.
        weight: Shape ``normalized_shape``; a half one sets the dtype of the result, ``None`` is
            left out.
        eps: Added to the mean square.
    """
    norm = norm_of(normalized_shape, eps, False, is_centred=False)
    dims = list(range(-len(norm.shape), 0))
    wide = input.to(math_dtype(input.dtype))
    result = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return result
    return weight * (result.to(weight.dtype) if is_half(weight) else result)


def _apply_of(tensors: int, **kind: bool) -> Any:
    """An ``apply`` whose arguments are ``tensors`` tensors and then those of `norm_of`."""

    def apply(*arguments: Any) -> torch.Tensor:
        norm, missing = norm_of(*arguments[tensors:], **kind), [None] * (3 - tensors)
        return in_torch(norm, *arguments[:tensors], *missing)

    return staticmethod(apply)


class FusedLayerNormFunction:
    """`fused_layer_norm` as ``apply(input, normalized_shape, eps, memory_efficient=False)``."""

    apply = _apply_of(1, is_centred=True)


class FusedRMSNormFunction:
    """`fused_rms_norm` as ``apply(input, normalized_shape, eps, memory_efficient=False)``."""

    apply = _apply_of(1, is_centred=False)


class FusedLayerNormAffineFunction:
    """`fused_layer_norm_affine`, called by ``apply``; the result has the input's dtype.

    ``apply(input, weight, bias, normalized_shape, eps, memory_efficient=False)``.
    """

    apply = _apply_of(3, is_centred=True)


class FusedRMSNormAffineFunction:
    """`fused_rms_norm_affine`, called by ``apply``; the result has the input's dtype.

    ``apply(input, weight, normalized_shape, eps, memory_efficient=False)``.
    """

    apply = _apply_of(2, is_centred=False)


class FusedLayerNormAffineMixedDtypesFunction:
    """`FusedLayerNormAffineFunction` whose result has the weight's dtype."""

    apply = _apply_of(3, is_centred=True, is_mixed=True)


class FusedRMSNormAffineMixedDtypesFunction:
    """`FusedRMSNormAffineFunction` whose result has the weight's dtype."""

    apply = _apply_of(2, is_centred=False, is_mixed=True)
