# SPDX-License-Identifier: BSD-3-Clause
"""Products of float32 and half tensors in half models, which torch refuses.

Where a model keeps constants or weights in float32, torch's promotion makes the results of sums and
pointwise products float32, and they meet half tensors again: queries that were rotated in float32
meet half values. As single layers bring their inputs to the dtype of their weights, products
bring float32 results to the half dtype they meet, except where a float32 parameter takes part:
that one is kept for its precision, so the product is computed in float32.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import nn

from preamp.casting.autocast_state import casting_device
from preamp.casting.functions import patch_all
from preamp.casting.patches import Rank, SharedInstall
from preamp.casting.wrappers import AnyFunction, is_mixed
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.pytree import map_tensors, tensors_in
from preamp.core.undo import UndoStack
from preamp.kernels.wide_half import WIDE_FUNCTIONS

FUNCTIONS: Final = (
    *(row for row in WIDE_FUNCTIONS if row[0] != "recurrent layers"),
    *((namespace, name) for namespace in ("torch", "torch.Tensor") for name in ("dot", "inner")),
    ("torch.linalg", "vecdot"),
)
"""``(namespace, name)`` of the products; recurrent layers are modules, which bring inputs along."""


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """What to compute in; ``None`` where float32 and one half dtype are not all there is."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(dtypes) != 2 or torch.float32 not in dtypes:
        return None
    (other,) = dtypes - {torch.float32}
    if other not in HALF_DTYPES:
        return None
    is_kept = any(t.dtype is torch.float32 and isinstance(t, nn.Parameter) for t in tensors)
    return torch.float32 if is_kept else other


def _mixed(fn: AnyFunction) -> AnyFunction:
    is_attention = fn.__name__ == "scaled_dot_product_attention"
    takes_lists = fn.__name__.endswith(("einsum", "multi_dot", "chain_matmul"))

    @functools.wraps(fn)
    def product(*args: Any, **kwargs: Any) -> Any:
        # Nearly every product in a program ends here.
        if not (takes_lists or is_mixed(args) or (kwargs and is_mixed([*args, *kwargs.values()]))):
            return fn(*args, **kwargs)
        operands, options = args, kwargs
        if is_attention:  # float32 masks fit half queries; their lowest values are no half numbers
            operands = args[:3]
            options = {name: value for name, value in kwargs.items() if name != "attn_mask"}
        dtype = _common_dtype([*tensors_in(operands), *tensors_in(options)])
        if dtype is None or kwargs.get("out") is not None or casting_device(args, kwargs):
            return fn(*args, **kwargs)
        if dtype is torch.float32:
            operands, options = args, kwargs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype)

        given = [map_tensors(cast, operand) for operand in operands]
        named = {name: map_tensors(cast, value) for name, value in options.items()}
        return fn(*given, *args[len(given) :], **{**kwargs, **named})

    return product


MIXED_PRODUCTS: Final = SharedInstall(patch_all(FUNCTIONS, Rank.MIXED, _mixed))
"""The installation of mixed products."""


def install_mixed_products(undo: UndoStack) -> None:
    """Let products take float32 and half tensors together, until ``undo``."""
    MIXED_PRODUCTS.acquire(undo)
