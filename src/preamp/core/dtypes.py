# SPDX-License-Identifier: BSD-3-Clause
"""The dtypes that the rest of the library reasons about."""

from __future__ import annotations

import functools

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The two half-precision dtypes; *half* means either of them everywhere in preamp."""


def is_half(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is float16 or bfloat16."""
    return tensor.dtype in HALF_DTYPES


@functools.cache  # every op asks
def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for itself, float32 for the rest, since some devices (MPS) have no float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype | bool | None) -> str:
    """``torch.float16`` as ``"float16"``; anything else by ``str``."""
    return str(dtype).removeprefix("torch.")
