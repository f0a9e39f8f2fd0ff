# SPDX-License-Identifier: BSD-3-Clause
"""Casts of a module's inputs and outputs, as hooks that survive copying and pickling."""

from __future__ import annotations

from typing import Any, Literal

import torch

from preamp.core.dtypes import is_half
from preamp.core.link import EngineHook
from preamp.core.pytree import cast_floating, map_leaves
from preamp.core.torch_private.modules import add_hook
from preamp.core.undo import UndoStack


class CastInputs(EngineHook):
    """Forward pre-hook: cast the floating tensors among the arguments to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Cast to ``dtype``."""
        self.dtype = dtype  # float32 while the weights are exact

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to call ``forward`` with."""
        cast_kwargs = {name: cast_floating(value, self.dtype) for name, value in kwargs.items()}
        return tuple(cast_floating(value, self.dtype) for value in args), cast_kwargs


class CastOutputs(EngineHook):
    """Forward hook: cast the floating tensors in the result to ``dtype``.

    Without one, half tensors are cast to float32, and float64 ones are left.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Cast to ``dtype``, or widen."""
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result to hand to the caller."""
        if self.dtype is None:
            return map_leaves(_widened, output)
        return cast_floating(output, self.dtype)


def _widened(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.to(torch.float32) if is_half(leaf) else leaf


class MatchWeightDtype(EngineHook):
    """Forward pre-hook of a layer: casts inputs that a model made in float32 to its weights'."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments to call ``forward`` with; ``None`` if they stay as they are."""
        dtype = _dtype_of(module)
        if dtype is None:
            return None
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as nearly always
            (value,) = args
            is_to_cast = value.dtype is not dtype and value.is_floating_point()
            return ((value.to(dtype),), kwargs) if is_to_cast else None
        if args and isinstance(args[0], torch.Tensor) and args[0].is_nested:
            # Attention takes nested queries that are its keys and values too.
            nested = args[0].to(dtype)
            args = tuple([nested if arg is args[0] else arg for arg in args])
        if kwargs:
            kwargs = {name: cast_floating(value, dtype) for name, value in kwargs.items()}
        return tuple([cast_floating(value, dtype) for value in args]), kwargs


def _dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """That of a layer's weights; without any that of its statistics, as batch norms have them."""
    # Plain loops, which torch.compile has been able to trace since torch 2.6.
    own: Any = module
    for tensor in own._parameters.values():  # noqa: SLF001 - a tenth of the time of `parameters`
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return None


def attach_io_casts(
    module: torch.nn.Module,
    inputs: torch.dtype | None,
    outputs: torch.dtype | Literal["widened"] | None,
    undo: UndoStack,
) -> None:
    """Hook the casts of one engine's floating arguments and results onto a model's root."""
    if inputs is not None:
        hook = CastInputs(inputs)
        add_hook(module, "register_forward_pre_hook", hook, undo, with_kwargs=True)
    if outputs is not None:
        after = CastOutputs(None if outputs == "widened" else outputs)
        add_hook(module, "register_forward_hook", after, undo)
