# SPDX-License-Identifier: BSD-3-Clause
"""What stays float32 in a model that is cast to half, and what a cast would do to the rest.

Three kinds: what ``keep_fp32`` names; buffers that are not persistent, which are constants that a
reload would compute in float32; and affine batch norms.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from preamp.core.dtypes import is_half
from preamp.core.errors import PreampPolicyError, worded
from preamp.core.torch_private.modules import unsaved_buffers
from preamp.policy import KeepFP32

# Layers whose kernels want inputs and weights of one dtype. Batch norms join them only where they
# are half themselves: float32 ones take half inputs.
_SINGLE_DTYPE_LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.PReLU, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

# The common base of all batch norms, SyncBatchNorm and user subclasses included, has no public
# name of its own.
_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]


def is_affine_batchnorm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch norm with weights of its own, of any kind."""
    return isinstance(module, _BATCH_NORM) and bool(module.affine)


def is_single_layer(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of ``torch.nn`` whose tensors share a dtype."""
    return isinstance(module, (*_SINGLE_DTYPE_LAYERS, _BATCH_NORM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Tensors by their ``id``, of some models."""

    # ``id`` of the modules that ``keep_fp32`` names, and of all modules in them: their inputs are
    # brought to float32
    modules: frozenset[int] = frozenset()
    # parameters and buffers in them, and those named themselves
    named: frozenset[int] = frozenset()
    # buffers that are not persistent, with their names
    constants: Mapping[int, str] = field(default_factory=dict[int, str])
    norms: frozenset[int] = frozenset()  # what only affine batch norms own

    def is_wide(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is float32 where the rest of its model is half."""
        return id(tensor) in self.named or id(tensor) in self.constants


def find_kept(models: Sequence[nn.Module], keep: KeepFP32) -> Kept:
    """Find in ``models`` what stays float32 if they are cast to half. Changes nothing.

    A layer of ``torch.nn`` stays together: naming its bias keeps its weight too. So does what is
    tied: a tensor is kept if any of its names is. Patterns are compared with the names in each
    root; one, or a type, that nothing answers to raises ``PreampPolicyError``.
    """
    parts = [part for model in models for part in _named_modules(model)]
    owned = [(f"{name}.{own}".lstrip("."), t) for name, part in parts for own, t in _own(part)]
    _check_found(keep, parts, [name for name, _ in owned])
    modules = {
        id(inner)
        for name, part in parts
        if any(_names_module(entry, name, part) for entry in keep)
        for inner in part.modules()
    }
    named = {id(t) for _, part in parts if id(part) in modules for _, t in _own(part)}
    named |= {id(t) for name, t in owned if any(_names_tensor(entry, name, t) for entry in keep)}
    layers = [
        {id(tensor) for tensor in floating_tensors(part)}
        for _, part in parts
        if is_single_layer(part)
    ]
    while grown := [own for own in layers if own & named and not own <= named]:
        named.update(*grown)
    return Kept(
        modules=frozenset(modules),
        named=frozenset(named),
        constants={
            id(tensor): f"{name}.{own}".lstrip(".")
            for name, part in parts
            for own, tensor in _own(part)
            if own in unsaved_buffers(part) and not is_half(tensor)
        },
        norms=find_norms(models),
    )


def find_norms(models: Iterable[nn.Module]) -> frozenset[int]:
    """``id`` of the tensors that only affine batch norms own."""
    own: dict[bool, set[int]] = {True: set(), False: set()}
    for model in models:
        for module in model.modules():
            own[is_affine_batchnorm(module)].update(id(tensor) for _, tensor in _own(module))
    return frozenset(own[True] - own[False])


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Any", model).named_modules(remove_duplicate=False)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors of one module under its own names for them."""
    for name, tensor in (
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ):
        if tensor.is_floating_point():
            yield name, tensor


def floating_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The floating parameters and buffers of ``module`` and what is in it."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            yield tensor


def _names_module(entry: object, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        return fnmatchcase(name, entry)
    return isinstance(entry, type) and isinstance(module, entry)


def _names_tensor(entry: object, name: str, tensor: torch.Tensor) -> bool:
    if isinstance(entry, str):
        return fnmatchcase(name, entry)
    return callable(entry) and not isinstance(entry, type) and bool(entry(name, tensor))


def _check_found(
    keep: KeepFP32, parts: Sequence[tuple[str, nn.Module]], tensors: Iterable[str]
) -> None:
    kinds = sorted({type(part).__qualname__ for _, part in parts})
    modules = [name for name, _ in parts]
    names = list(dict.fromkeys([*tensors, *filter(None, modules)]))
    for entry in keep:
        if isinstance(entry, type):
            is_found = any(isinstance(part, entry) for _, part in parts)
            got = f"keep_fp32 names the type {entry.__qualname__}, and no module is one"
            allowed = f"The types there are: {_nearest(entry.__qualname__, kinds)}"
        else:
            is_found = not isinstance(entry, str) or any(
                fnmatchcase(name, entry) for name in (*names, *modules)
            )
            got = f"keep_fp32={entry!r} matches no parameter, buffer or module"
            allowed = f"The nearest names are {_nearest(str(entry), names)}"
        if not is_found:
            raise worded(
                PreampPolicyError,
                got,
                allowed,
                "Name something that the models have, or leave it out; * in a pattern stands for "
                "any text",
            )


def _nearest(wanted: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4) or names[:3]
    return ", ".join(map(repr, near)) or "none"


def changed_by_cast(
    models: Iterable[nn.Module], kept: Kept, dtype: torch.dtype, *, keep_batchnorm_fp32: bool
) -> dict[str, str]:
    """Say in words, by name, which persistent buffers a cast changes by more than its rounding.

    That is: a finite value becomes infinite, one that is not zero becomes zero, a buffer of whole
    numbers gets others, or the buffer as a whole is further off than half a unit in the last place
    of each of its values (as values too small for the format are). Reads values: synchronises.
    Tensors without memory, sparse and sharded ones are not looked at.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, buffer in (named for model in models for named in model.named_buffers()):
        is_norm = keep_batchnorm_fp32 and id(buffer) in kept.norms
        # Neither fake nor sharded; sparse ones are graphs more often than numbers.
        is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
        has_values = is_plain and not buffer.is_meta and buffer.numel() > 0
        is_cast = has_values and buffer.is_floating_point() and not is_half(buffer)
        if is_cast and not (id(buffer) in seen or kept.is_wide(buffer) or is_norm):
            seen.add(id(buffer))
            if loss := _loss_by_cast(buffer.detach(), dtype):
                found[name] = loss
    return found


def _loss_by_cast(value: torch.Tensor, dtype: torch.dtype) -> str:
    value = value[value.isfinite()]
    rounded = value.to(dtype).to(value.dtype)
    off = rounded - value
    if bool(rounded.isinf().any()):
        return f"{float(value.abs().max()):.3g} becomes infinite"
    if bool(((rounded == 0) & (value != 0)).any()):
        return "values too small for it become 0"
    if bool((value == value.round()).all()) and bool((off != 0).any()):
        return f"whole numbers up to {float(value.abs().max()):.0f} become others"
    if bool(off.abs().sum() > torch.finfo(dtype).eps / 2 * value.abs().sum()):
        return "values near the smallest it has lose most of their digits"
    return ""
