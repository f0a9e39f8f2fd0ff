# SPDX-License-Identifier: BSD-3-Clause
"""What a class of tensors needs that answers torch's operations itself."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

T = TypeVar("T", bound=torch.Tensor)

_C: Any = cast("Any", torch)._C

hears_no_functions: Any = _C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that hears of operations only."""

unhooked: Any = _C.DisableTorchFunctionSubclass
"""A context in which classes of tensors are not asked what their attributes are.

Each question to a tensor of a class of its own, as a master, costs a third then.
"""


def made_like(kind: type[T], like: torch.Tensor) -> T:
    """A tensor of ``kind`` that has no memory, and all else as ``like``.

    Who asks for its memory gets an error of torch, as ``to_dlpack`` does.
    """
    make: Any = cast("Any", torch.Tensor)._make_wrapper_subclass
    options = {"strides": like.stride(), "dtype": like.dtype, "device": like.device}
    made = make(kind, like.shape, **options, storage_size=0)
    _C._set_throw_on_mutable_data_ptr(made)
    return made
