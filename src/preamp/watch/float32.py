# SPDX-License-Identifier: BSD-3-Clause
"""What a module's forward that went wrong gives in float32, computed by a copy of the module."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from preamp.casting import disable_casts
from preamp.core.dtypes import dtype_name
from preamp.core.pytree import map_leaves
from preamp.core.randomness import untouched_random
from preamp.core.ranks import has_other_ranks
from preamp.core.torch_private.extremes import without_modes
from preamp.core.torch_private.modules import remove_hooks
from preamp.core.torch_private.operations import unheard
from preamp.numerics import Float32Record
from preamp.watch.observation import Values, tensors_of

_HALVES = (torch.float16, torch.bfloat16)
_SHOWN = 120  # characters of an error

MasterOf = Callable[[torch.Tensor], torch.Tensor | None]


def note_random(device: torch.device) -> Callable[[], None]:
    """Note the state of the random numbers of ``device``; return what puts it back."""
    if device.type == "cpu":
        return partial(torch.set_rng_state, torch.get_rng_state())
    own: Any = torch.get_device_module(device)
    return partial(own.set_rng_state, own.get_rng_state(device), device)


def uses_halves(module: nn.Module, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether ``tensors``, or those that ``module`` keeps, are halves."""
    owned = (tensor for _, tensor in own_tensors(module))
    return any(tensor.dtype in _HALVES for tensor in (*tensors, *owned))


def compute(
    module: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    begin: Callable[[], None],
    master_of: MasterOf,
) -> Float32Record:
    """Compute ``module(*args, **kwargs)`` in float32 with its float32 weights, without gradients.

    A copy of the module does so, without anybody's hooks. Buffers and random numbers stay as they
    are; ``begin`` puts these back to where the forward began. Synchronises.
    """
    device = tensors_of(given)[0].device
    if has_other_ranks() and not _is_torch_layer(module):
        return Float32Record(found="failed", why="it may talk to other ranks")
    try:
        with untouched_random(), torch.no_grad(), disable_casts(), unheard(), without_modes():
            with torch.autocast(device.type, enabled=False):
                twin = _copy_of(module, master_of)
                args, kwargs = map_leaves(_widened, given)
                begin()
                result = twin.forward(*args, **kwargs)
        readings = Values().read(tensors_of(result))
    except Exception as error:  # a program's own
        text = " ".join(str(error).split())[:_SHOWN].rstrip(". ")
        return Float32Record(found="failed", why=f"{type(error).__name__}: {text}".rstrip(": "))
    if not readings:
        return Float32Record(found="failed", why="it has returned no tensor that can be read")
    if all(one.is_finite for one in readings):
        return Float32Record(found="finite", max_abs=max(one.max_abs for one in readings))
    wrong = [one for one in readings if not one.is_finite]
    halves = [dtype_name(one.dtype) for one in wrong if one.dtype in _HALVES]
    if halves:
        return Float32Record(found="failed", why=f"it casts to {halves[0]} itself")
    if lost := _lost_in_cast(module, master_of):
        return Float32Record(found="failed", why=lost)
    is_nan = any(one.has_nan for one in wrong)
    return Float32Record(found="nan" if is_nan else "inf")


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether it consists of layers of torch that compute on one rank alone."""
    kinds = set(map(type, module.modules()))
    return nn.SyncBatchNorm not in kinds and all(
        kind.__module__.startswith("torch.nn.modules.") for kind in kinds
    )


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of it and what is inside, and what else they keep, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    modules: Iterable[tuple[str, nn.Module]] = cast("Any", module).named_modules()
    for inside, inner in modules:
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                yield f"{inside}.{name}".strip("."), value


def _lost_in_cast(module: nn.Module, master_of: MasterOf) -> str:
    """Say which half tensor is infinite, perhaps since it was cast; what it was nobody knows."""
    for name, tensor in own_tensors(module):
        has_no_other = tensor.dtype in _HALVES and master_of(tensor) is None
        if has_no_other and any(math.isinf(one.max_abs) for one in Values().read([tensor])):
            return (
                f"its {name!r} is infinite in {dtype_name(tensor.dtype)} already, as a cast makes "
                "what is too large for it; keep_fp32 leaves it as it is"
            )
    return ""


def _widened(leaf: torch.Tensor) -> torch.Tensor:
    """Copy it, since a forward may write to what it is given."""
    return leaf.detach().to(torch.float32 if leaf.dtype in _HALVES else leaf.dtype, copy=True)


def _copy_of(module: nn.Module, master_of: MasterOf) -> nn.Module:
    """Copy ``module`` with weights and buffers in float32, without hooks and gradients."""
    memo: dict[int, Any] = {}
    for _, tensor in own_tensors(module):
        wide = _widened(tensor)
        master = master_of(tensor) if tensor.dtype in _HALVES else None
        if master is not None:  # where the program has written to the half, it does not know
            wide = torch.where(master.to(tensor.dtype) == tensor, master, wide)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide
    twin = copy.deepcopy(module, memo)
    for inner in twin.modules():
        remove_hooks(inner, lambda hook: True)
    return twin
