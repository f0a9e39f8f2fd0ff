# SPDX-License-Identifier: BSD-3-Clause
"""Casts of a module's inputs and outputs, as hooks that survive copying and pickling."""

from __future__ import annotations

from typing import Any

import torch

from preamp.core.link import EngineHook
from preamp.core.pytree import cast_floating
from preamp.core.undo import UndoStack
from preamp.kernels.modules import add_hook


class CastInputs(EngineHook):
    """Forward pre-hook: cast the floating tensors among the arguments to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Cast to ``dtype``."""
        self.dtype = dtype
        self.is_on = True

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to call ``forward`` with."""
        if not self.is_on:  # the weights are exact for the moment
            return args, kwargs
        cast_kwargs = {name: cast_floating(value, self.dtype) for name, value in kwargs.items()}
        return tuple(cast_floating(value, self.dtype) for value in args), cast_kwargs


class CastOutputs(EngineHook):
    """Forward hook: cast the floating tensors in the result to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Cast to ``dtype``."""
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result to hand to the caller."""
        return cast_floating(output, self.dtype)


class MatchWeightDtype(EngineHook):
    """Forward pre-hook of a layer: casts inputs that a model made in float32 to its weights'."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to call ``forward`` with."""
        # A batch norm without weights of its own still has statistics of one dtype.
        # Plain loops, which torch.compile has been able to trace since torch 2.6.
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                dtype = tensor.dtype
                if args and isinstance(args[0], torch.Tensor) and args[0].is_nested:
                    # Attention takes nested queries that are its keys and values too.
                    nested = args[0].to(dtype)
                    args = tuple([nested if arg is args[0] else arg for arg in args])
                cast_kwargs = {name: cast_floating(value, dtype) for name, value in kwargs.items()}
                return tuple([cast_floating(value, dtype) for value in args]), cast_kwargs
        return args, kwargs


def attach_io_casts(
    module: torch.nn.Module,
    inputs: torch.dtype | None,
    outputs: torch.dtype | None,
    undo: UndoStack,
) -> None:
    """Hook the casts of one engine's floating arguments and results onto a model's root."""
    if inputs is not None:
        add_hook(module, "register_forward_pre_hook", CastInputs(inputs), undo, with_kwargs=True)
    if outputs is not None:
        add_hook(module, "register_forward_hook", CastOutputs(outputs), undo)
