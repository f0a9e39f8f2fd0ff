# SPDX-License-Identifier: BSD-3-Clause
"""What torch keeps about modules and optimizers, private to it."""

from __future__ import annotations

import importlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import nn

from preamp.core.undo import UndoStack, set_attribute


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that are not persistent; scripted modules tell none."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))


def recurrent_functions() -> ModuleType:
    """The private module, the only one, on which recurrent layers and cells find ``lstm`` etc."""
    return importlib.import_module("torch._VF")


def call_hooks_after_interrupts(is_on: bool) -> None:
    """Let torch call ``always_call`` hooks of modules after a ``KeyboardInterrupt`` too, or not.

    It looks for ``Exception`` where modules are called. A global of that name hides Python's own
    from the file, so it is there during forwards that need it only.
    """
    names = cast("dict[str, object]", vars(nn.modules.module))
    if is_on:
        names["Exception"] = BaseException
    else:
        names.pop("Exception", None)


def add_hook(owner: Any, register: str, hook: object, undo: UndoStack, **options: bool) -> None:
    """Register a hook by a method of a module or an optimizer; ``undo`` removes it.

    The hook is looked for, since an interrupt may come before the handle that torch returns.
    ``undo`` does not keep the owner alive.

    What ``prepend`` puts first stays last in the dictionary below the ``OrderedDict``, whose order
    torch's compiler of 2.8 takes for that of the hooks. So the entries are put in anew.
    """
    weak = weakref.ref(owner)

    def remove() -> None:
        if (alive := weak()) is not None:
            remove_hooks(alive, lambda other: other is hook)

    undo.push(remove)
    if isinstance(owner, torch.jit.ScriptModule):  # whose own method refuses what its calls heed
        getattr(nn.Module, register)(owner, hook, **options)
    else:
        getattr(owner, register)(hook, **options)
    if options.get("prepend"):
        for table in _hook_tables(owner).values():
            entries = list(table.items())
            if entries != list(dict[int, object].items(table)):
                try:
                    table.clear()
                finally:
                    table.update(entries)


_HOOKS_OF_OPTIMIZERS: Final = tuple(
    f"_optimizer_{of}_{when}_hooks"
    for of in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def make_hook_tables(optimizer: Any, undo: UndoStack) -> None:
    """Let an optimizer that skips ``Optimizer.__init__`` have hooks of its own, until ``undo``.

    One that forwards every name would hand out those of the optimizer inside.
    """
    for name in _HOOKS_OF_OPTIMIZERS:
        if name not in vars(optimizer):
            set_attribute(optimizer, name, OrderedDict[int, object](), undo)


def with_step_hooks(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any]
) -> Callable[..., Any]:
    """``step``, which takes the optimizer first, as torch calls it: between its step hooks.

    ``Optimizer.__init__`` wraps the method of the class; who skips that has a bare one.
    """
    if getattr(getattr(type(optimizer), "step", None), "hooked", False):
        return step
    return torch.optim.Optimizer.profile_hook_step(step)


def _hooks_meant(
    tables: Iterable[dict[int, object]], is_meant: Callable[[object], bool]
) -> set[int]:
    return {
        key
        for table in tables
        for key, hook in table.items()
        if is_meant(getattr(hook, "hook", hook))  # torch wraps some
    }


def has_hook(owner: Any, kind: type) -> bool:
    """Whether a module or an optimizer has a hook of a class."""
    return bool(_hooks_meant(_hook_tables(owner).values(), lambda hook: isinstance(hook, kind)))


def remove_hooks(owner: Any, is_meant: Callable[[object], bool]) -> None:
    """Remove hooks of a module or an optimizer, with what torch notes about them."""
    tables = _hook_tables(owner)
    for name, table in tables.items():
        notes = [tables[other] for other in tables if other.startswith(name) and other != name]
        for key in _hooks_meant([table], is_meant):
            for beside in notes:  # as `_forward_hooks_with_kwargs`
                beside.pop(key, None)
            table.pop(key, None)  # last: by it, a call after an interrupt finds the notes again


def _hook_tables(owner: Any) -> dict[str, dict[int, object]]:
    return {
        name: cast("dict[int, object]", table)
        for name, table in cast("dict[str, object]", vars(owner)).items()
        if "_hooks" in name and isinstance(table, dict)
    }
