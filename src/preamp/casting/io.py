# SPDX-License-Identifier: BSD-3-Clause
"""Casts of a module's inputs and outputs, as hooks that survive copying and pickling."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any, Literal

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import bad_state
from preamp.core.link import EngineHook
from preamp.core.pytree import cast_floating, map_leaves
from preamp.core.torch_private.modules import add_hook, drop_in_replicas, keep_in_replicas
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
    """Forward hook: cast the floating tensors in the result to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Cast to ``dtype``."""
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result to hand to the caller."""
        return cast_floating(output, self.dtype)


class WidenOutputs(EngineHook):
    """Forward hook: cast the half tensors in the result to float32, and leave float64 ones."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result to hand to the caller."""
        return map_leaves(_widened, output)


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
    for tensor in module.parameters():
        if tensor.is_floating_point():
            return tensor.dtype
    for tensor in module.buffers():
        if tensor.is_floating_point():
            return tensor.dtype
    return None


class CastForward:
    """``model.forward`` as Apex left it: called by hand, it casts as the hooks of a call do.

    It is an attribute of the model, does not keep it alive, and goes into copies and pickles of
    the model as theirs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: CastInputs | None,
        outputs: CastOutputs | WidenOutputs | None,
        own: Any = None,
    ) -> None:
        """Cast by the hooks of ``module``; ``own`` is a ``forward`` that it had as an attribute."""
        self._module = weakref.ref(module)
        self._inputs = inputs
        self._outputs = outputs
        self.own = own
        self.is_over = False  # the engine that it is of let go of the model

    def _forward(self) -> tuple[torch.nn.Module, Any]:
        module = self._module()
        if module is None:
            raise bad_state(
                "The model whose forward this is has been deleted",
                "A shallow copy of a model has the forward of the model itself",
                "Keep the model, or copy it by copy.deepcopy",
            )
        # No bound method: torch.compile of torch 2.6 cannot make one.
        return module, self.own or partial(type(module).forward, module)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own ``forward``, which trainers read for the names of columns."""
        return inspect.signature(self._forward()[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own ``forward`` returns, casts around it."""
        module, forward = self._forward()
        if self._inputs is not None:
            args, kwargs = self._inputs(module, args, kwargs)
        result = forward(*args, **kwargs)
        return result if self._outputs is None else self._outputs(module, args, result)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew for the copied model."""
        return CastForward, (self._forward()[0], self._inputs, self._outputs, self.own)


def attach_forward(
    module: torch.nn.Module,
    inputs: CastInputs | None,
    outputs: CastOutputs | WidenOutputs | None,
    undo: UndoStack,
) -> None:
    """Let ``module.forward`` cast too, until ``undo``; which leaves one that came later."""
    before = vars(module).get("forward")
    own = before.own if isinstance(before, CastForward) else before
    made = CastForward(module, inputs, outputs, own)
    weak = weakref.ref(module)

    def remove() -> None:
        made.is_over = True
        if (alive := weak()) is not None and vars(alive).get("forward") is made:
            remove_forward(alive, before)

    undo.push(remove)
    vars(module)["forward"] = made
    drop_in_replicas(module, "forward")


def remove_forward(module: torch.nn.Module, before: Any = None) -> None:
    """Give a module the ``forward`` of ``before`` again if that still casts, else its own."""
    now = vars(module).get("forward")
    if not isinstance(now, CastForward):
        return
    if isinstance(before, CastForward) and not before.is_over:
        vars(module)["forward"] = before
        return
    keep_in_replicas(module)
    if now.own is not None:
        vars(module)["forward"] = now.own
    else:
        del vars(module)["forward"]


def attach_io_casts(
    module: torch.nn.Module,
    inputs: torch.dtype | None,
    outputs: torch.dtype | Literal["widened"] | None,
    undo: UndoStack,
    *,
    casts_forward: bool = False,
) -> None:
    """Hook the casts of one engine's floating arguments and results onto a model's root.

    With ``casts_forward`` its ``forward`` casts too where it is called by hand; not a scripted one.
    """
    before = None if inputs is None else CastInputs(inputs)
    after = None
    if outputs is not None:
        after = WidenOutputs() if outputs == "widened" else CastOutputs(outputs)
    if before is not None:
        add_hook(module, "register_forward_pre_hook", before, undo, with_kwargs=True)
    if after is not None:
        add_hook(module, "register_forward_hook", after, undo)
    if casts_forward and (before or after) and not isinstance(module, torch.jit.ScriptModule):
        attach_forward(module, before, after, undo)
