# SPDX-License-Identifier: BSD-3-Clause
"""Calls that mix float32 and half tensors, which torch refuses: what half models make of them.

A forward makes float32 tensors of its own (masks, positions, one-hot codes), and models keep
constants or weights in float32. torch's promotion makes sums and pointwise products with them
float32, and these meet half tensors again: queries that were rotated in float32 meet half values.
As single layers bring their inputs to the dtype of their weights,

- products bring float32 results to the half dtype they meet, except where a float32 parameter takes
  part: that one is kept for its precision, so the product is computed in float32;
- what is stored into a tensor is brought to its dtype, as ``copy_`` does;
- what is neither computes in float32, as torch's promotion would.

The functions are torch's, for the whole process, and not only within forwards: activation
checkpoints run a part of one again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from preamp.casting.autocast_state import casting_device
from preamp.casting.functions import patch_all
from preamp.casting.patches import Rank, SharedInstall, Wrapper
from preamp.casting.wrappers import AnyFunction, is_mixed
from preamp.core.pytree import map_tensors
from preamp.core.undo import UndoStack
from preamp.kernels.wide_half import WIDE_FUNCTIONS, leaves

_F: Final = "torch.nn.functional"


def _rows(names: str, *namespaces: str) -> tuple[tuple[str, str], ...]:
    return tuple((namespace, name) for namespace in namespaces for name in names.split())


PRODUCTS: Final = (
    *(row for row in WIDE_FUNCTIONS if row[0] != "recurrent layers"),
    *_rows("dot inner vdot addr prelu", "torch", "torch.Tensor"),
    *_rows("prelu embedding_bag", _F),
    *_rows("vecdot", "torch.linalg"),
)
"""``(namespace, name)`` of the products; recurrent layers are modules, which bring inputs along."""

_PUT: Final = (
    "index_add index_copy index_put index_reduce put scatter scatter_add scatter_reduce "
    "masked_scatter"
)
STORES: Final = (
    *_rows(_PUT, "torch", "torch.Tensor"),
    *_rows(" ".join([f"{name}_" for name in _PUT.split()]), "torch.Tensor"),
    *_rows("addmm_ addmv_ addr_ addbmm_ baddbmm_ __setitem__", "torch.Tensor"),
)
"""Those that put values into their first argument, or into a copy of it."""

PROMOTED: Final = (
    *_rows("grid_sample binary_cross_entropy cross_entropy nll_loss huber_loss", _F),
    *_rows("layer_norm group_norm", _F),
    *_rows("lerp cross", "torch", "torch.Tensor"),
    *_rows("cross", "torch.linalg"),
)
"""Those that compute in float32."""

_Choice = Callable[[Sequence[torch.Tensor]], torch.dtype]
"""What to compute in, by the floating tensors among the arguments."""


def _half_unless_kept(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    if any([t.dtype is torch.float32 and isinstance(t, nn.Parameter) for t in tensors]):
        return torch.float32
    return next(iter({t.dtype for t in tensors} - {torch.float32}))


def _as_first(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    return tensors[0].dtype


def _float32(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _call_alike(
    fn: AnyFunction, choose: _Choice, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``fn``; float32 and tensors of one half dtype are brought to what ``choose`` says."""
    operands, options = args, kwargs
    if fn.__name__ == "scaled_dot_product_attention":
        # float32 masks fit half queries; their lowest values are no half numbers
        operands = args[:3]
        options = {name: value for name, value in kwargs.items() if name != "attn_mask"}
    found = leaves((*operands, *options.values()))
    if not is_mixed(found):
        return fn(*args, **kwargs)
    floating = [t for t in found if t.is_floating_point()]
    is_pair = len({t.dtype for t in floating}) == 2
    if fn.__name__ in ("layer_norm", "group_norm") and floating[0].dtype is not torch.float32:
        return fn(*args, **kwargs)  # torch takes half inputs with float32 weights
    if not is_pair or kwargs.get("out") is not None or casting_device(args, kwargs):
        return fn(*args, **kwargs)
    dtype = choose(floating)
    if dtype is torch.float32:
        operands, options = args, kwargs

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype)

    given = [map_tensors(cast, operand) for operand in operands]
    named = {name: map_tensors(cast, value) for name, value in options.items()}
    return fn(*given, *args[len(given) :], **{**kwargs, **named})


_OPERANDS_ELSEWHERE: Final = frozenset("einsum multi_dot chain_matmul tensordot bilinear".split())


def _product(fn: AnyFunction) -> AnyFunction:
    is_attention = fn.__name__ == "scaled_dot_product_attention"
    # whether all its tensors are the first two arguments and perhaps the third
    is_plain = fn.__name__.rpartition("linalg_")[2] not in _OPERANDS_ELSEWHERE

    @functools.wraps(fn)
    def product(*args: Any, **kwargs: Any) -> Any:
        # Nearly every product in a program ends here, so it is three look-ups.
        is_alike = False
        if is_plain and (not kwargs or (is_attention and len(args) > 2)):
            try:
                dtype = args[0].dtype
                is_alike = args[1].dtype is dtype and (
                    len(args) < 3 or args[2] is None or args[2].dtype is dtype
                )
            except (AttributeError, IndexError):  # by name, or nothing that torch takes
                pass
        if is_alike:
            return fn(*args, **kwargs)
        return _call_alike(fn, _half_unless_kept, args, kwargs)

    return product


def _by(choose: _Choice) -> Wrapper:
    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def alike(*args: Any, **kwargs: Any) -> Any:
            if not (is_mixed(args) or (kwargs and is_mixed([*args, *kwargs.values()]))):
                return fn(*args, **kwargs)
            return _call_alike(fn, choose, args, kwargs)

        return alike

    return wrap


def _install(undo: UndoStack) -> None:
    for rows, wrap in ((PRODUCTS, _product), (STORES, _by(_as_first)), (PROMOTED, _by(_float32))):
        patch_all(rows, Rank.MIXED, wrap)(undo)


MIXED_CALLS: Final = SharedInstall(_install)
"""The installation of what takes float32 and half tensors together."""


def install_mixed_calls(undo: UndoStack) -> None:
    """Let functions take float32 and half tensors together, until ``undo``."""
    MIXED_CALLS.acquire(undo)
