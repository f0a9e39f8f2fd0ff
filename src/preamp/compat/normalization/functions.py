# SPDX-License-Identifier: BSD-3-Clause
"""The functions of ``apex.normalization.fused_layer_norm``.

``eps`` defaults to 1e-6 here and to 1e-5 in the layers, as in Apex. ``memory_efficient`` keeps the
output for backward instead of the input; weights that start at zero do not learn then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.compat.normalization.compute import Norm, as_shape, normalize

Shape = int | Sequence[int]


def _norm(
    shape: Shape, eps: float, memory_efficient: bool, *, is_centred: bool, is_mixed: bool = False
) -> Norm:
    return Norm(
        shape=as_shape(shape),
        eps=eps,
        is_centred=is_centred,
        is_mixed=is_mixed,
        memory_efficient=memory_efficient,
    )


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the layer norm of ``input`` over its last dimensions, in its dtype.

    ``(x - mean) / sqrt(var + eps)`` with the biased variance. Ba, Kiros and Hinton, 2016,
    arXiv:1607.06450.

    Args:
        input: Shape ``(…, *normalized_shape)``; statistics are in float32, or float64.
        normalized_shape: The dimensions to normalise over.
        eps: Added to the variance.
        memory_efficient: Keep the output for backward instead of the input.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=True)
    return normalize(norm, input, None)


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return `fused_layer_norm` of ``input``, times ``weight``, plus ``bias``, in its dtype.

    ``weight`` and ``bias`` have the shape ``normalized_shape`` and any floating dtype; the other
    arguments are those of `fused_layer_norm`.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=True)
    return normalize(norm, input, weight, bias)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return `fused_layer_norm_affine` in the dtype of ``weight``.

    ``weight`` and ``bias`` have the shape ``normalized_shape`` and any floating dtype; the other
    arguments are those of `fused_layer_norm`.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=True, is_mixed=True)
    return normalize(norm, input, weight, bias)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the RMS norm of ``input`` over its last dimensions, in its dtype.

    ``x / sqrt(mean(x²) + eps)``. Zhang and Sennrich, 2019, arXiv:1910.07467.

    Args:
        input: Shape ``(…, *normalized_shape)``; statistics are in float32, or float64.
        normalized_shape: The dimensions to normalise over.
        eps: Added to the mean square.
        memory_efficient: Keep the output for backward instead of the input.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=False)
    return normalize(norm, input, None)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return `fused_rms_norm` of ``input``, times ``weight``, in its dtype.

    ``weight`` has the shape ``normalized_shape`` and any floating dtype; the other arguments are
    those of `fused_rms_norm`.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=False)
    return normalize(norm, input, weight)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return `fused_rms_norm_affine` in the dtype of ``weight``.

    ``weight`` has the shape ``normalized_shape`` and any floating dtype; the other arguments are
    those of `fused_rms_norm`.
    """
    norm = _norm(normalized_shape, eps, memory_efficient, is_centred=False, is_mixed=True)
    return normalize(norm, input, weight)
