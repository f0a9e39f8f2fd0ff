# SPDX-License-Identifier: BSD-3-Clause
"""The functions of ``apex.normalization.fused_layer_norm``, and its classes with ``apply``.

``eps`` defaults to 1e-6 here and to 1e-5 in the layers, as in Apex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import torch
from torch.nn import functional as F

from preamp.core.dtypes import is_half, math_dtype
from preamp.core.errors import unavailable

Shape = int | Sequence[int]


def norm_of(
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
    *,
    is_centred: bool,
    is_mixed: bool = False,
) -> Norm:
    """The `Norm` of arguments as the functions and layers take them."""
    if memory_efficient:
        raise unavailable(
            "memory_efficient=True was asked for",
            "The backward of a norm starts from its input, which is kept",
            "Leave it out; torch.utils.checkpoint around a block keeps less than the norm would",
        )
    return Norm(shape=as_shape(normalized_shape), eps=eps, is_centred=is_centred, is_mixed=is_mixed)


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
        memory_efficient: Must be false; `PreampUnavailableError` otherwise.
    """
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=True)
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
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=True)
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
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=True, is_mixed=True)
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
        memory_efficient: Must be false; `PreampUnavailableError` otherwise.
    """
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=False)
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
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=False)
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
    norm = norm_of(normalized_shape, eps, memory_efficient, is_centred=False, is_mixed=True)
    return normalize(norm, input, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What to compute: ``x̂ · weight + bias`` with ``x̂ = (x - mean) / sqrt(mean square + eps)``."""

    shape: tuple[int, ...]  # the last dimensions of x, which mean and mean square are taken over
    eps: float  # added to the mean square
    is_centred: bool  # layer norm; an RMS norm takes 0 in place of the mean and has no bias
    is_mixed: bool = False  # whether the result has the weight's dtype; otherwise it has that of x


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """A single number, NumPy's too, as a shape of one dimension; a shape as a tuple."""
    if isinstance(normalized_shape, Integral):
        return (int(normalized_shape),)
    return tuple(cast("Sequence[int]", normalized_shape))


def normalize(
    norm: Norm, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm of ``x``, of shape ``(…, *norm.shape)`` and any floating dtype.

    Statistics are in float32 (float64 for float64). Under autocast the arguments are first cast
    to its dtype, float64 ones excepted, which then is also the result's. ``None`` stands for a
    weight of ones, and a bias of zeros.
    """
    device = x.device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return in_torch(norm, x, weight, bias)
    half = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return in_torch(norm, *(_autocast(tensor, half) for tensor in (x, weight, bias)))


def _has_autocast(device: str) -> bool:
    if torch.compiler.is_compiling():  # torch 2.6 and 2.8 cannot trace the question
        return device != "meta"
    return torch.amp.is_autocast_available(device)


def _autocast(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.to(dtype)


def in_torch(norm: Norm, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """As `normalize`, without the casts of autocast."""
    out_dtype = weight.dtype if norm.is_mixed else x.dtype
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if dtypes != {out_dtype}:  # torch wants one dtype; the wide one rounds once
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        x, weight, bias = (t if t is None else t.to(wide) for t in (x, weight, bias))
    if norm.is_centred:
        result = F.layer_norm(x, norm.shape, weight, bias, norm.eps)
    else:
        result = F.rms_norm(x, norm.shape, weight, norm.eps)
    return result.to(out_dtype)


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
    """An ``apply`` whose arguments are ``tensors`` tensors and then those of `norm_of`.

    Scripts take it for one of an ``autograd.Function``, and pass arguments by position. As in Apex
    nothing is cast under autocast and ``eps`` has no default.
    """

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
