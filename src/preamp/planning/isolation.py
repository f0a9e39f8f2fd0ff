# SPDX-License-Identifier: BSD-3-Clause
"""Trying things out without a trace: copies, and random numbers put back."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_value

LossFn = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A training: the caller's, or a copy of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    batch: Any

    def copy(self) -> Task:
        """Copy all of it; see `copies_of`. Its parameters have no gradients."""
        return Task(
            **copies_of(
                model=self.model, optimizer=self.optimizer, loss_fn=self.loss_fn, batch=self.batch
            )
        )


@contextmanager
def untouched_random() -> Generator[None]:
    """Put the states of torch's, Python's and numpy's random numbers back at the end."""
    kind, devices = _accelerators()
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with cast("Any", torch.random).fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


def _accelerators() -> tuple[str, list[int]]:
    """The kind and numbers of the accelerators; none on a machine that has none."""
    if not torch.accelerator.is_available():  # torch 2.6 raises where it is asked for one then
        return "cuda", []
    kind = torch.accelerator.current_accelerator()
    return "cuda" if kind is None else kind.type, list(range(torch.accelerator.device_count()))


def copies_of(memo: dict[int, Any] | None = None, /, **parts: Any) -> dict[str, Any]:
    """Copy objects together, so that what they share their copies share, too.

    A function is copied with what it closes over and with the globals that it and the functions
    of its module use. ``memo`` is `copy.deepcopy`'s: what to take in place of copies, by id.

    Raises:
        ValueError: One of them cannot be copied.
    """
    memo = {} if memo is None else memo
    twins: dict[str, Any] = {}
    for name, part in parts.items():
        twins[name] = _copied(part, memo, f"The argument {name}")
    model: nn.Module = twins["model"]
    for param in model.parameters():
        param.grad = None
    return twins


def _copied(value: Any, memo: dict[int, Any], what: str) -> Any:
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        args, keywords = _copied((made.args, made.keywords), memo, what)
        return functools.partial(_copied(made.func, memo, what), *args, **keywords)
    if isinstance(value, FunctionType):
        inner: object = inspect.unwrap(value)
        home = inner if isinstance(inner, FunctionType) else value
        return _FunctionCopies(home.__globals__, memo).copy(value)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if callable(value) and not isinstance(value, nn.Module):
            return value  # a function that torch.jit or Triton compiled: it has no state
        raise bad_value(
            f"{what} cannot be copied: {error}",
            "Every level is tried on copies made by copy.deepcopy, so that all see the same and "
            "nothing of the caller's changes",
            "Move what cannot be copied (open files, locks, iterators, graphs) out of it",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error tells of the machine's memory, the CPU's or an accelerator's."""
    is_cpus = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpus or isinstance(error, (MemoryError, torch.OutOfMemoryError))


class _FunctionCopies:
    """Copies of functions of one module, which share their globals as the originals do.

    `copy.deepcopy` takes functions as they are, with all state that they close over.
    """

    def __init__(self, home: dict[str, Any], memo: dict[int, Any]) -> None:
        self._home = home  # the module's globals
        self._globals = dict(home)
        self._known = set[str]()  # names in it that are copies, or about to be
        self._made: dict[int, FunctionType] = {}  # by id of the original
        self._memo = memo

    def copy(self, function: FunctionType) -> FunctionType:
        """Copy a function of the module, or what another library has wrapped around one."""
        is_ours = function.__globals__ is self._home
        if id(function) in self._made:
            return self._made[id(function)]
        if not is_ours and not hasattr(function, "__wrapped__"):
            return function
        code, cells = function.__code__, function.__closure__ or ()
        twins = tuple(CellType() for _ in cells)
        scope = self._globals if is_ours else function.__globals__
        twin = FunctionType(code, scope, function.__name__, None, twins)
        self._made[id(function)] = twin  # before what it uses, which may be the function itself
        twin.__dict__.update(function.__dict__)
        given = (function.__defaults__, function.__kwdefaults__)
        what = f"A default of {function.__name__}"
        twin.__defaults__, twin.__kwdefaults__ = _copied(given, self._memo, what)
        for name, cell, old in zip(code.co_freevars, twins, cells, strict=True):
            for content in _contents(old):
                is_copied = is_ours or isinstance(content, FunctionType)
                cell.cell_contents = self._copy_value(name, content) if is_copied else content
        if is_ours:
            self._copy_globals(code)
        return twin

    def _copy_globals(self, code: CodeType) -> None:
        for name in {*_global_names(code)} & self._home.keys() - self._known:
            self._known.add(name)
            self._globals[name] = self._copy_value(name, self._home[name])

    def _copy_value(self, name: str, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self.copy(value)
        if isinstance(value, ModuleType):
            return value
        return _copied(value, self._memo, f"{name!r}, which loss_fn uses,")


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
