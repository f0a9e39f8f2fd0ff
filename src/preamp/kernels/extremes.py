# SPDX-License-Identifier: BSD-3-Clause
"""Smallest and largest value of any tensor that a model may hand around."""

from __future__ import annotations

from typing import Any, cast

import torch

from preamp.kernels.sparse import stored_parts

_functorch: Any = cast("Any", torch)._C._functorch
_READABLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@torch.no_grad()
def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read ``tensor`` once: its smallest and largest value, 0-dim, both nan if any is.

    Of complex tensors those of the parts; of sparse ones those of the stored values, duplicates
    not summed. ``None`` for what has no such values: integers, 8-bit floats, empty, nested and
    meta tensors, subclasses, and tensors inside of ``torch.func`` transforms. Does not synchronise.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in _READABLE:
        return None
    if tensor.device.type == "meta" or tensor.is_nested:
        return None
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        _, values = stored_parts(values)
    elif values.layout is not torch.strided:
        return None
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() == 0:
        return None
    low, high = torch.aminmax(values)
    return low, high
