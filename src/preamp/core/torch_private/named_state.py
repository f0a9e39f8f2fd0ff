# SPDX-License-Identifier: BSD-3-Clause
"""Let ``torch.distributed.checkpoint.state_dict`` find the names of masters.

It looks for an optimizer's parameters among those of the model, which are half weights where the
optimizer has masters. So while anybody holds this, its two private functions that walk over a
model's parameters find the master in a half weight's place: for the state of optimizers, and where
a whole state dict is cut into the sharded tensors of a model, which has to be in float32. A third
one makes the state of a new optimizer by a step with zeros, of which the engine is to know.
A torch that lacks one of the three is left as it is.

The module takes long to import, and few scripts use it. So it is changed where it is loaded, or as
soon as it will be. What is private to torch here is the same in torch 2.6, 2.8, 2.13 and 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final, cast

import torch

from preamp.core.undo import UndoStack, set_attribute

MODULE: Final = "torch.distributed.checkpoint.state_dict"
MasterOf = Callable[[torch.Tensor], torch.Tensor | None]
DuringStep = Callable[[torch.optim.Optimizer], AbstractContextManager[None]]


class NamedMasters:
    """Tells torch of an engine's masters for as long as it is held."""

    def __init__(
        self, master_of: MasterOf, during_step: DuringStep, unwrap: Callable[[Any], Any]
    ) -> None:
        """Keep what finds the master of a half weight, or ``None``.

        ``during_step`` is entered while torch makes an optimizer's state by a step with zeros.
        ``unwrap`` takes that optimizer out of a framework's wrapper, which may skip such a step.
        """
        self.master_of = master_of
        self.during_step = during_step
        self.unwrap = unwrap

    def hold(self) -> None:
        """Change torch's module, now or when it is loaded, if nobody has yet."""
        _HOLDERS.append(self)
        if MODULE in sys.modules:
            _change(sys.modules[MODULE])
        elif _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, cast("Any", _FINDER))

    def remove(self) -> None:
        """Change it back after the last holder; may be called twice."""
        if self in _HOLDERS:
            _HOLDERS.remove(self)
        if _HOLDERS:
            return
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(cast("Any", _FINDER))
        module = vars(sys.modules[MODULE]) if MODULE in sys.modules else {}
        for name, wrap in _WRAPPERS.items():
            if isinstance(module.get(name), wrap):
                module[name] = module[name].original


_HOLDERS: list[NamedMasters] = []


def _master_of(value: Any) -> Any:
    """The master of a half weight; anything else itself."""
    if isinstance(value, torch.nn.Parameter):
        for holder in _HOLDERS:
            if (master := holder.master_of(value)) is not None:
                return master
    return value


class _Wrapper:
    """A function of the module around the one that torch has there."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original


class _ModelState(_Wrapper):
    """``_iterate_valid_model_state``: names and values of a model's state."""

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, value in self.original(*args, **kwargs):
            yield name, _master_of(value)


class _OptimizerState(_Wrapper):
    """``_get_optim_state_dict``, which calls ``model.named_parameters``."""

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        inner, undo = model.named_parameters, UndoStack()

        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, param in inner(*args, **kwargs):
                yield name, _master_of(param)

        try:
            set_attribute(model, "named_parameters", named_parameters, undo)
            return self.original(model, *args, **kwargs)
        finally:
            undo.unwind()


class _StateMade(_Wrapper):
    """``_init_optim_state``: takes a step with zeros where an optimizer has no state yet."""

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        with ExitStack() as stack:
            for holder in tuple(_HOLDERS):
                optimizer = holder.unwrap(optimizer)
                stack.enter_context(holder.during_step(optimizer))
            return self.original(optimizer)


_WRAPPERS: Final[dict[str, type[_Wrapper]]] = {
    "_iterate_valid_model_state": _ModelState,
    "_get_optim_state_dict": _OptimizerState,
    "_init_optim_state": _StateMade,
}


def _change(module: ModuleType) -> None:
    names = vars(module)
    if not _WRAPPERS.keys() <= names.keys():  # a torch that has other ones: it finds half weights
        return
    for name, wrap in _WRAPPERS.items():
        if not isinstance(names[name], wrap):
            names[name] = wrap(names[name])


class _Finder:
    """Finds the module as Python does, and has it changed once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader = cast("Any", spec.loader)
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if _HOLDERS:
                _change(module)

        loader.exec_module = exec_module
        return spec


_FINDER: Final = _Finder()
