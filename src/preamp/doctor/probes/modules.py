# SPDX-License-Identifier: BSD-3-Clause
"""Probes on what modules compute: calls, dtypes, and what is compiled."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from preamp.core.dtypes import is_half
from preamp.core.pytree import tensors_in
from preamp.core.tensors import stored_grad
from preamp.core.torch_private.autograd import backward_under_way
from preamp.core.torch_private.observe import ObservedOps
from preamp.core.undo import UndoStack
from preamp.doctor.probes.around import Function, around, telling
from preamp.doctor.watch import Watch

_STEPS = 8  # optimizer steps after which calls of modules are not looked at any more


class ModuleProbes:
    """Hooks on all modules for the first steps, and wrappers of what loads, saves and compiles.

    Ended is what would be compiled into the model, or would keep it from running compiled.
    """

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        self._watch = watch
        self._depth = threading.local()
        self._hooks = UndoStack()
        undo.push(self._hooks.unwind)
        self._hooks.hold(
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        for name in ("item", "__float__"):
            around(watch, torch.Tensor, name, self._read, self._hooks)
        for name in ("isnan", "isinf", "isfinite"):
            around(watch, torch, name, self._read, self._hooks)
        loaded = telling(watch, "weights_loaded", late=True)
        around(watch, nn.Module, "load_state_dict", loaded, undo)
        around(watch, torch, "save", telling(watch, "saved"), undo)
        around(watch, torch, "load", telling(watch, "loaded", of_result=True), undo)
        self._operations = OperationProbes(watch, undo)
        around(watch, torch, "compile", self._compile, undo)

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
        depth = self._depth.value = max(getattr(self._depth, "value", 1) - 1, 0)
        # In a backward a checkpoint calls modules once more, and may end that with its own error.
        is_call = depth == 0 and backward_under_way() < 0
        if not torch.is_grad_enabled():
            if is_call:
                self._watch.tell("model_evaluated", module)
            return
        if is_call and output is None and sys.exc_info()[0] is not None:
            self._watch.tell("model_failed")
        elif is_call:
            self._watch.seen.forwards += 1
            self._watch.tell("model_called", module, output)
        if self._watch.seen.steps < _STEPS and next(tensors_in(output), None) is not None:
            self._watch.tell("module_called", module, output)

    def _read(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else None
        is_loss = isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.numel() == 1
        if is_loss and not self._watch.is_looking:
            self._watch.tell("loss_read", tensor)
        return function(*args, **kwargs)

    def _compile(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        seen = self._watch.seen
        if not seen.compiles:
            seen.compiles = True
            self._hooks.unwind()
            self._operations.leave_alone()
            self._watch.notes.append(
                "The script uses torch.compile. From there on calls of modules were not looked at, "
                "and what is compiled has no graph to read: PA102, PA204, PA301, PA302 and PA304 "
                "see less. A compiled optimizer.step is not seen at all."
            )
        model = args[0] if args else kwargs.get("model")
        model = getattr(model, "__self__", model)  # Module.compile hands over a method
        if isinstance(model, nn.Module):
            seen.roots[model] = None
        return function(*args, **kwargs)


_IN_PLACE: Final = ("add_", "sub_", "lerp_", "addcmul_", "addcdiv_", "copy_")
_NO_USE: Final = ("zero_", "fill_", "detach_", "unscale_")
_BACKWARDS = 3


class OperationProbes:
    """Looks at all operations between the first and the second optimizer step.

    Where no step follows three backwards, at those that read gradients, until one does.
    """

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        self._watch = watch
        watch.after_step.append(self._step_taken)
        self._mode: ObservedOps | None = None
        self._thread = 0
        self._is_over = False
        self._patches = UndoStack()
        undo.push(self.leave_alone)
        self._backwards = 0
        self._addresses: set[int] = set()  # of gradients
        self._is_read = self._is_changed = False  # gradients, by the script
        around(watch, torch.autograd, "backward", self._backward, self._patches)

    def _step_taken(self) -> None:
        """Start after the first step, and stop after the second."""
        if self._watch.seen.steps > 1:
            self._stop()
        elif not self._is_over:
            self._start()

    def _backward(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self._backwards += 1
        if self._backwards == _BACKWARDS and not self._watch.seen.steps:
            self._start()
        if self._mode is not None:
            self._addresses = self._watch.attempt(self._gradients) or set()
        return result

    def _gradients(self) -> set[int]:
        grads = map(stored_grad, self._watch.seen.all_params())
        return _addresses(grad for grad in grads if grad is not None)

    def _start(self) -> None:
        """Look from now on, unless a mode of the script's is in the way."""
        mode = ObservedOps(self._look)
        if self._mode is None and mode.start():
            self._thread, self._mode = threading.get_ident(), mode

    def _look(
        self, func: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        steps = self._watch.seen.steps
        if self._watch.is_looking or self._is_over:
            return
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        if steps == 1:
            targets = read if name.startswith("_foreach_") else written
            self._watch.attempt(self._note_writes, name.removeprefix("_foreach_"), targets)
        elif not steps and backward_under_way() < 0:
            self._watch.attempt(self._note_gradients, name, read)

    def _note_gradients(self, name: str, read: Sequence[torch.Tensor]) -> None:
        """Tell what the script computes from gradients from what sets them to zero."""
        addresses = _addresses(read)
        if addresses.isdisjoint(self._addresses) or name.endswith(_NO_USE):
            return
        self._addresses = self._gradients()  # an address may be another tensor's by now
        if not addresses.isdisjoint(self._addresses):
            self._is_changed |= name.endswith("_")
            self._is_read |= not name.endswith("_")
            self._watch.seen.reads_gradients = self._is_read and not self._is_changed

    def _stop(self) -> None:
        """Stop; where another mode is in the way, after a later step."""
        if self._mode is not None and threading.get_ident() == self._thread and self._mode.stop():
            self._mode = None

    def leave_alone(self) -> None:
        """Note nothing any more."""
        self._is_over = True
        self._patches.unwind()
        self._stop()

    def _note_writes(self, name: str, targets: Sequence[torch.Tensor]) -> None:
        """Tell of half tensors that the script computes in place between steps."""
        if name in _IN_PLACE and not any(f.is_inside for f in self._watch.seen.optimizers.values()):
            for target in filter(is_half, targets):
                self._watch.tell("written", target)


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where their values are; sparse tensors have no one place."""
    return {tensor.data_ptr() for tensor in tensors if tensor.layout is torch.strided}
