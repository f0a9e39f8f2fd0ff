# SPDX-License-Identifier: BSD-3-Clause
"""Probes on modules: what is called, in which dtype, and what is cast as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from preamp.core.pytree import tensors_in
from preamp.core.undo import UndoStack
from preamp.doctor.detector import ModuleCall
from preamp.doctor.probes.watch import Watch, around

STEPS = 8
"""Optimizer steps after which calls of modules are not looked at any more."""


class ModuleProbes:
    """Hooks on all modules for the first steps, and wrappers of ``to`` and ``half``."""

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        """Install the probes; ``undo`` takes them off."""
        self._watch = watch
        self._depth = threading.local()
        self._hooks = UndoStack()
        undo.push(self._hooks.unwind)
        self._hooks.hold(
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        around(nn.Module, "to", self._to, undo)
        around(nn.Module, "half", self._half, undo)

    def step_taken(self) -> None:
        """Leave modules alone once enough steps have been seen."""
        if self._watch.seen.steps >= STEPS:
            self.leave_alone()

    def leave_alone(self) -> None:
        """Look at no calls any more."""
        self._hooks.unwind()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not self._watch.is_active:
            return
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0 and torch.is_grad_enabled():
            self._watch.seen.roots[module] = None

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._watch.is_active:
            return
        self._depth.value = max(getattr(self._depth, "value", 1) - 1, 0)
        first = next(tensors_in(output), None)
        if first is None or not torch.is_grad_enabled():
            return
        device = first.device.type
        autocast = torch.get_autocast_dtype(device) if _casts(device) else None
        self._watch.tell("module_called", ModuleCall(module, inputs, output, autocast))

    def _to(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._watch.is_active:
            for value in (*args[1:], *kwargs.values()):
                dtype = value.dtype if isinstance(value, torch.Tensor) else value
                if isinstance(dtype, torch.dtype):
                    self._watch.tell("module_cast", args[0], dtype)
        return function(*args, **kwargs)

    def _half(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._watch.is_active:
            self._watch.tell("module_cast", args[0], torch.float16)
        return function(*args, **kwargs)


def _casts(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # no autocast there
        return False
