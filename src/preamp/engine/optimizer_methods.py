# SPDX-License-Identifier: BSD-3-Clause
"""Methods put on an optimizer's instance, and the arguments they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

SCHEDULER_MARK = "_wrapped_by_lr_sched"


def previous_method(optimizer: torch.optim.Optimizer, name: str) -> Callable[..., Any]:
    """The method as a function of the optimizer: the instance's own if it has one."""
    if name in vars(optimizer) or not hasattr(type(optimizer), name):  # mocks make theirs up
        own = getattr(optimizer, name)

        def call_own(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        copy_identity(own, call_own)
        return call_own

    def call_class(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(optimizer), name)(optimizer, *args, **kwargs)

    copy_identity(getattr(type(optimizer), name), call_class)
    return call_class


def copy_identity(source: Any, target: Callable[..., Any]) -> None:
    """Give ``target`` the name, text and signature of ``source``, and the scheduler's mark."""
    for attribute in ("__name__", "__qualname__", "__doc__"):
        if hasattr(source, attribute):
            setattr(target, attribute, getattr(source, attribute))
    try:
        setattr(target, "__signature__", inspect.signature(source))  # noqa: B010
    except (TypeError, ValueError):  # some callables have none
        pass
    if getattr(source, SCHEDULER_MARK, False):
        setattr(target, SCHEDULER_MARK, True)


def find_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``step``; hooks see the optimizer itself first."""
    positional = [arg for arg in args if not isinstance(arg, torch.optim.Optimizer)]
    closure = kwargs.get("closure", positional[0] if positional else None)
    return closure if callable(closure) else None


def replace_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``step``, as hooks see them, with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    optimizer, _, *rest = args
    return (optimizer, closure, *rest), kwargs
