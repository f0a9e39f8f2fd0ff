# SPDX-License-Identifier: BSD-3-Clause
"""Smallest and largest value of any tensor that a model may hand around."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.utils import _python_dispatch

from preamp.core.torch_private.sparse import stored_parts

_C: Any = cast("Any", torch)._C
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
    meta tensors, tensors whose memory was freed, subclasses, and all inside of ``torch.func``
    transforms. Modes of the program, which may count or record operations, do not hear of it. Does
    not synchronise.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in _READABLE:
        return None
    if tensor.device.type == "meta" or tensor.is_nested:
        return None
    if _C._functorch.peek_interpreter_stack() is not None:
        return None  # what is computed there belongs to the transform
    if _C._functorch.is_functorch_wrapped_tensor(tensor):
        return None  # has left its transform
    with without_modes():
        return _read(tensor.detach())


def without_modes() -> AbstractContextManager[object]:
    """Take off the modes that hear of this thread's operations, such as one that makes a graph."""
    if not _C._len_torch_dispatch_stack():
        return nullcontext()
    return cast("Any", _python_dispatch)._disable_current_modes()


def _read(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    if values.layout is torch.sparse_coo:
        _, values = stored_parts(values)
    elif values.layout is not torch.strided:
        return None
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() == 0 or values.untyped_storage().nbytes() == 0:
        return None
    low, high = torch.aminmax(values)
    return low, high
