# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of half models hold float32: the masters' exact values, in and out.

The hooks sit on every sub-module, so that ``model.backbone.state_dict()`` is exact too, and each
looks at its module's own entries only. Models of transformers write a configuration beside their
weights, which is to name the same dtype.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.errors import bad_state
from preamp.core.link import EngineHook, Link
from preamp.core.protocols import MasterLookup
from preamp.core.torch_private.modules import add_hook
from preamp.core.undo import UndoStack, set_attribute

_WITHOUT_COPIES = ContextVar("state dicts have the masters themselves", default=False)


@contextmanager
def without_copies() -> Generator[None]:
    """Let state dicts have the masters themselves, as they have a float32 model's own weights.

    What stands for a master is put in as it is, which may be a split one.
    """
    token = _WITHOUT_COPIES.set(True)
    try:
        yield
    finally:
        _WITHOUT_COPIES.reset(token)


class SaveFloat32(EngineHook):
    """State-dict hook: replace half entries by float32 copies, exact where there is a master."""

    def __init__(self, link: Link[MasterLookup]) -> None:
        """Look masters up through ``link``; a copied model has none and is widened."""
        self.link = link

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Mutates ``state_dict``; the new entries share no memory with model or masters.

        Those of masters do where the caller asked for it by `without_copies`.
        """
        lookup, copy = self.link.target, not _WITHOUT_COPIES.get()
        for name, own in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and is_half(value):
                master = None if lookup is None else lookup.exact_value(own)
                if master is None or copy:
                    source = value if master is None else master
                    master = source.detach().to(torch.float32, copy=copy)
                state_dict[prefix + name] = master


class LoadMasters(EngineHook):
    """Load-state-dict pre-hook: set the masters before the values are rounded to half."""

    def __init__(self, link: Link[MasterLookup]) -> None:
        """Look masters up through ``link``."""
        self.link = link

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Mutates the masters, and ``state_dict`` so that the half weight is the rounded master."""
        lookup = self.link.target
        if lookup is None or not lookup.has_masters:
            return
        if metadata.get("assign_to_params_buffers", False):
            raise bad_state(
                "load_state_dict(assign=True) on a model with master weights",
                "Parameters must keep their identity: the optimizer's masters belong to them",
                "Load without assign=True, or load before preamp.initialize",
            )
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            # torch reports the entries that do not fit.
            if isinstance(value, torch.Tensor):
                taken = lookup.load_exact(param, value)
                state_dict[prefix + name] = value if taken is None else taken


def attach_state_hooks(
    layers: Iterable[nn.Module], link: Link[MasterLookup], undo: UndoStack
) -> None:
    """Hook modules of a model, each by itself."""
    for module in cast("Iterable[Any]", layers):  # torch leaves these two untyped
        add_hook(module, "register_state_dict_post_hook", SaveFloat32(link), undo)
        add_hook(module, "register_load_state_dict_pre_hook", LoadMasters(link), undo)
        if hasattr(getattr(module, "config", None), "dtype") and hasattr(module, "save_pretrained"):
            set_attribute(module, "save_pretrained", MethodType(save_pretrained, module), undo)


def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model of transformers; its configuration names the dtype that its weights are in.

    transformers takes that of the parameters, and asks the configuration to save itself after.
    """
    config, kind = model.config, cast("Any", type(model))
    own = cast("dict[str, Any]", vars(config))
    values: list[torch.Tensor] = list((kwargs.get("state_dict") or model.state_dict()).values())
    dtypes = [value.dtype for value in values if value.is_floating_point()]

    def save_config(*own_args: Any, **options: Any) -> Any:
        own.pop("save_pretrained", None)  # or it would be saved, too
        config.dtype = dtype_name(dtypes[0])
        return config.save_pretrained(*own_args, **options)

    if dtypes:
        config.save_pretrained = save_config
    try:
        return kind.save_pretrained(model, *args, **kwargs)
    finally:
        own.pop("save_pretrained", None)
