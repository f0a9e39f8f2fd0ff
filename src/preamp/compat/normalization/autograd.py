# SPDX-License-Identifier: BSD-3-Clause
"""The ``autograd.Function`` classes of ``apex.normalization.fused_layer_norm``.

Scripts call their ``apply`` with positional arguments, in the order of ``forward`` here. As in
Apex nothing is cast under autocast, ``eps`` has no default, and gradients cannot be differentiated
again; the functions of ``functions.py`` cast, and can.
"""

from __future__ import annotations

from typing import Any

import torch

from preamp.compat.normalization.functions import NormFunction, Shape, norm_of
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


def _forward_of(tensors: int, **kind: bool) -> Any:
    """A ``forward`` whose arguments are ``tensors`` tensors and then those of `norm_of`."""

    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        ctx.tensors = tensors
        norm, missing = norm_of(*arguments[tensors:], **kind), [None] * (3 - tensors)
        return NormFunction.forward(ctx, norm, *arguments[:tensors], *missing)

    return staticmethod(forward)


class _Function(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of the tensors, and ``None`` for the other three arguments."""
        grads = NormFunction.backward(ctx, *grad_outputs)[1:]
        return (*grads[: ctx.tensors], None, None, None)


class FusedLayerNormFunction(_Function):
    """`fused_layer_norm` as ``apply(input, normalized_shape, eps, memory_efficient=False)``."""

    forward = _forward_of(1, is_centred=True)


class FusedRMSNormFunction(_Function):
    """`fused_rms_norm` as ``apply(input, normalized_shape, eps, memory_efficient=False)``."""

    forward = _forward_of(1, is_centred=False)


class FusedLayerNormAffineFunction(_Function):
    """`fused_layer_norm_affine`, called by ``apply``; the result has the input's dtype.

    ``apply(input, weight, bias, normalized_shape, eps, memory_efficient=False)``.
    """

    forward = _forward_of(3, is_centred=True)


class FusedRMSNormAffineFunction(_Function):
    """`fused_rms_norm_affine`, called by ``apply``; the result has the input's dtype.

    ``apply(input, weight, normalized_shape, eps, memory_efficient=False)``.
    """

    forward = _forward_of(2, is_centred=False)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """`FusedLayerNormAffineFunction` whose result has the weight's dtype."""

    forward = _forward_of(3, is_centred=True, is_mixed=True)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """`FusedRMSNormAffineFunction` whose result has the weight's dtype."""

    forward = _forward_of(2, is_centred=False, is_mixed=True)
