# SPDX-License-Identifier: BSD-3-Clause
"""What torch's ``fully_shard`` keeps beside the parameters it has sharded.

Everything here is private to torch, and works with torch 2.6, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module`` itself."""
    return hasattr(module, "_get_fsdp_state")


def _groups(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that are gathered and reduced together, each once."""
    seen: set[int] = set()
    for module in model.modules():
        if not is_fully_sharded(module):
            continue
        state = cast("Any", module)._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)
        if found is None:  # before torch 2.12 there was at most one
            found = [state._fsdp_param_group]
        for group in found:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def has_sharded_parts(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on anything in ``model``."""
    return any(is_fully_sharded(module) for module in model.modules())


def reshard(models: Iterable[nn.Module]) -> None:
    """Give the modules their sharded parameters back, as they are between two steps."""
    for model in models:
        for module in model.modules():
            if is_fully_sharded(module):
                cast("Any", module).reshard()


def renew(model: nn.Module) -> None:
    """Let ``fully_shard``, which looks at the first forward only, see changed memory and dtypes."""
    for group in _groups(model):
        for param in group.fsdp_params:
            param.reset_sharded_param()
            param.all_gather_outputs = []
            if hasattr(param, "_unsharded_param"):
                del param._unsharded_param
        if hasattr(group, "_reduce_dtype"):  # it ran already
            group._init_mp_dtypes()
        if hasattr(group, "_reduce_scatter_param_indices"):  # by dtype, from torch 2.14 on
            group._init_reduce_scatter_param_order()


def dtypes_of_groups(model: nn.Module) -> Iterator[tuple[set[torch.dtype], list[str]]]:
    """The dtypes of the trainable parameters of each group, and the parameters' names."""
    names = {id(param): name for name, param in model.named_parameters()}
    for group in _groups(model):
        own = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        yield {param.dtype for param in own}, [names.get(id(param), "") for param in own]


def gather_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes that a ``MixedPrecisionPolicy`` has parameters gathered in."""
    params = [param for group in _groups(model) for param in group.fsdp_params]
    return {param.mp_policy.param_dtype for param in params} - {None}


def holds_unreduced(model: nn.Module) -> bool:
    """Whether there are gradients that a backward has left unreduced, on this rank alone."""
    return any(_is_unreduced(param) for group in _groups(model) for param in group.fsdp_params) or (
        any(getattr(group, "_partial_reduce_output", None) is not None for group in _groups(model))
    )


def _is_unreduced(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (
        whole is not None and whole.grad is not None
    )
