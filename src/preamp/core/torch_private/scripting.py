# SPDX-License-Identifier: BSD-3-Clause
"""Let TorchScript and the compiler see through functions that were put over torch's own."""

from __future__ import annotations

import functools
import importlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Fn = TypeVar("Fn", bound=Callable[..., Any])


def scriptable(replacement: types.FunctionType, original: Any) -> types.FunctionType:
    """Let ``torch.jit.script`` compile calls of ``replacement`` as calls of ``original``.

    Forward-mode derivatives need this too: torch scripts their formulas on first use. Scripted
    code is cast by torch's own autocast only. TorchScript knows C functions by their identity, in
    a table that is private, and asks Python functions what to compile in their place. So either
    ``replacement`` is mutated, or that table as long as the result lives, which may wrap it.
    """
    table = _builtin_table()
    op = table.get(id(original))
    if op is not None:
        # Before Python gives the same identity to something else.
        weakref.finalize(replacement, table.pop, id(replacement), None).atexit = False
        table[id(replacement)] = op
    elif isinstance(original, types.FunctionType):
        name = _overloaded_name(original)
        if name is not None:
            replacement = _in_namespace_of(original, replacement)
            setattr(replacement, "_jit_override_qualname", name)  # noqa: B010 - private to torch
        else:
            cast("Any", replacement).__prepare_scriptable__ = lambda: original
    return replacement


def know_traced_names() -> bool:
    """Let ``torch.compile`` look torch's functions up before any of them is replaced.

    It knows them by their identity, in a table that is made once. Made while functions are
    replaced, the table would not know the originals, which the replacements call. Returns whether
    it does; not where the compiler is not loaded yet, which takes a second.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    look_up = getattr(rules, "get_torch_obj_rule_map", None)
    if look_up is not None:
        look_up()
    return look_up is not None


def forget_traced_names() -> None:
    """Let ``torch.compile`` look torch's functions up again, now that the originals are back."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    clear = getattr(rules, "clear_lru_cache", None)
    if clear is not None:
        clear()


def not_compiled_alone(fn: Fn) -> Fn:
    """Keep ``torch.compile`` from making a graph of ``fn`` alone; within others it is traced.

    Where it compiles a model, torch calls the model's hooks outside of the graph, and compiles
    each as if it were a program: with ``fullgraph=True`` one that sets state, which no graph can
    do, is an error. Where this torch cannot be told, ``fn`` is left as it is.
    """
    frames = cast("Any", torch)._C._dynamo.eval_frame
    code = cast("types.FunctionType", cast("object", fn)).__code__
    if hasattr(frames, "skip_code"):  # until torch 2.6
        frames.skip_code(code)
    elif hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, default))
    return fn


def _builtin_table() -> dict[int, str]:
    """The operators of C functions, by ``id(function)``."""
    table = getattr(importlib.import_module("torch.jit._builtins"), "_get_builtin_table", dict)
    return cast("dict[int, str]", table())


def _overloaded_name(function: types.FunctionType) -> str | None:
    """The name under which TorchScript finds overloads of ``function``, if it has any."""
    internal = importlib.import_module("torch._jit_internal")
    overloads = getattr(internal, "_get_fn_overloads", None)
    name_of = getattr(internal, "_qualified_name", None)
    if overloads is None or name_of is None or not function.__module__:
        return None
    name = cast("str", name_of(function))
    return name if overloads(name) else None


def _in_namespace_of(original: types.FunctionType, function: types.FunctionType) -> Any:
    """Call ``function``, with ``original``'s globals, as TorchScript looks names up there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    moved = types.FunctionType(
        call.__code__, original.__globals__, original.__name__, None, call.__closure__
    )
    return functools.update_wrapper(moved, function)
