# SPDX-License-Identifier: BSD-3-Clause
"""Copies of a training, so that a step can be traced without a trace in the caller's."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_value

LossFn = Callable[[nn.Module, Any], torch.Tensor]


def copies_of(
    model: nn.Module, loss_fn: LossFn, batch: Any, memo: dict[int, Any]
) -> tuple[nn.Module, LossFn, Any]:
    """Copy a training together, so that what its parts share their copies share, too.

    A function is copied with what it closes over and with the globals that it and the functions
    of its module read. ``memo`` is `copy.deepcopy`'s: what to take in place of copies, by id.

    Raises:
        ValueError: One of them cannot be copied.
    """
    copier = _Copier(memo)
    parts = {"model": model, "loss_fn": loss_fn, "batch": batch}
    for part in parts.values():
        copier.include_module_of(part)
    model, loss_fn, batch = (copier.copy(part, f"The argument {n}") for n, part in parts.items())
    return model, loss_fn, batch


class _Copier:
    """Makes copies that share what their originals share, functions and globals included.

    `copy.deepcopy` takes functions as they are, with all state that they close over or read.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._scopes: dict[int, dict[str, Any]] = {}  # copies of modules' globals, by id
        self._read = set[tuple[int, str]]()  # the names in them that are copies, or about to be
        self._made: dict[int, FunctionType] = {}  # copies of functions, by id

    def include_module_of(self, value: Any) -> None:
        """Copy the functions of the module that a function is from; others are left alone."""
        while isinstance(value, functools.partial):
            value = cast("functools.partial[Any]", value).func
        inner: object = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        if isinstance(inner, FunctionType):
            self._scopes.setdefault(id(inner.__globals__), dict(inner.__globals__))

    def copy(self, value: Any, what: str) -> Any:
        """Copy anything; ``what`` names it in an error."""
        if isinstance(value, ModuleType):
            return value
        if isinstance(value, FunctionType):
            return self._copy_function(value)
        if isinstance(value, functools.partial):
            made = cast("functools.partial[Any]", value)
            args, keywords = self.copy((made.args, made.keywords), what)
            return functools.partial(self.copy(made.func, what), *args, **keywords)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            if callable(value) and not isinstance(value, nn.Module):
                return value  # a function that torch.jit or Triton compiled: it has no state
            raise bad_value(
                f"{what} cannot be copied: {error}",
                "A step is traced on copies made by copy.deepcopy, so that nothing of the "
                "caller's changes",
                "Move what cannot be copied (open files, locks, generators, graphs) out of it",
            ) from error

    def _copy_function(self, function: FunctionType) -> FunctionType:
        """Copy a function of a module that counts, or what a library has wrapped around one."""
        known = self._made.get(id(function))
        if known is not None:
            return known
        scope = self._scopes.get(id(function.__globals__))
        if scope is None and not hasattr(function, "__wrapped__"):
            return function
        code, cells = function.__code__, function.__closure__ or ()
        twins = tuple(CellType() for _ in cells)
        own = function.__globals__ if scope is None else scope
        twin = FunctionType(code, own, function.__name__, None, twins)
        self._made[id(function)] = twin  # before what it uses, which may be the function itself
        twin.__dict__.update(function.__dict__)
        given = (function.__defaults__, function.__kwdefaults__)
        twin.__defaults__, twin.__kwdefaults__ = self.copy(given, f"A default of {code.co_name}")
        for name, cell, old in zip(code.co_freevars, twins, cells, strict=True):
            for content in _contents(old):
                # A library's wrapper has more in its closure, which is the library's own.
                is_copied = scope is not None or isinstance(content, FunctionType)
                cell.cell_contents = self._copy_used(name, content) if is_copied else content
        if scope is not None:
            self._copy_globals(function, scope)
        return twin

    def _copy_globals(self, function: FunctionType, scope: dict[str, Any]) -> None:
        home = function.__globals__
        for name in {*_global_names(function.__code__)} & home.keys():
            if (id(home), name) not in self._read:
                self._read.add((id(home), name))
                scope[name] = self._copy_used(name, home[name])

    def _copy_used(self, name: str, value: Any) -> Any:
        return self.copy(value, f"{name!r}, which loss_fn uses,")


def _contents(cell: CellType) -> Iterator[Any]:
    """Yield what is in a cell; nothing where its variable has no value yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the globals that a function reads, and the functions made in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield cast("str", instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
