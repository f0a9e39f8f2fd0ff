# SPDX-License-Identifier: BSD-3-Clause
"""Hooks that give a model's forward casts of its own, or none.

The autocast weight cache is on inside model forwards only and is cleared when one ends, so a
weight changed between two forwards is never seen stale. Outside models the cache is off, and so it
is everywhere on versions of torch whose cache loses gradients. The
hooks are plain values: they hold neither model nor engine, and copy and pickle with the model.

Under ``torch.compile`` the casts that are on when a forward is traced become part of its graph, and
torch traces again where they differ. Where they are what the region wants there is nothing to set,
and the graph stays whole; where they are not, it breaks at the hook. ``torch.export``, whose
programs forget what a hook sets, is refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preamp.casting.autocast_state import (
    WEIGHT_CACHE_KEEPS_GRADIENTS,
    Devices,
    know_device_types,
    untraced,
)
from preamp.casting.thread_casts import CASTS, FORWARDS_OPEN, PUSHED, open_bracket, unwind_to
from preamp.core.errors import bad_state
from preamp.core.link import EngineHook
from preamp.core.torch_private.modules import add_hook
from preamp.core.torch_private.scripting import not_compiled_alone
from preamp.core.undo import UndoStack, finished

_COMMON = ("cpu", "cuda", "xpu", "mps")  # device types that may cast while a forward is traced


def _is_exporting() -> bool:
    if hasattr(torch.compiler, "is_exporting"):  # since torch 2.7
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


@untraced
def _enter_casts(module: nn.Module, hook: _EnterCasts) -> None:
    bracket = open_bracket(module)
    if CASTS.disabled is None:
        on: Devices = dict.fromkeys(hook.device_types, (True, hook.dtype))
        bracket.saved.changed(on, WEIGHT_CACHE_KEEPS_GRADIENTS).restore()
        bracket.is_region = True
        torch.autocast_increment_nesting()


@untraced
def _enter_plain(module: nn.Module) -> None:
    bracket = open_bracket(module)
    around = CASTS.brackets[-2:][0].inside
    # A deeper count means that the user opened a torch.autocast region around this call.
    if bracket.inside == around and CASTS.disabled is None:
        CASTS.brackets[0].saved.restore()


@untraced
@finished  # torch does not call the hook that ends a forward again
def _leave(module: nn.Module) -> None:
    depths = [n for n, bracket in enumerate(CASTS.brackets) if bracket.module_id is not None]
    # Otherwise another module's bracket is innermost: this one's pre-hook did not run.
    if depths and CASTS.brackets[depths[-1]].module_id == id(module):
        unwind_to(depths[-1])


@dataclass(frozen=True, slots=True)
class _EnterCasts(EngineHook):
    """Forward pre-hook that opens a model's autocast region."""

    device_types: tuple[str, ...]  # no set: torch 2.6 cannot guard one while it traces
    dtype: torch.dtype

    @not_compiled_alone
    def __call__(self, module: nn.Module, args: Any) -> None:
        if _is_exporting():
            raise bad_state(
                "torch.export reached a model whose functions are cast",
                "A program of torch's has no casts that a hook turns on",
                "Export copy.deepcopy(model), which is float32, or use torch.jit.trace",
            )
        if torch.compiler.is_compiling() and self._are_on():
            return
        _enter_casts(module, self)

    def _are_on(self) -> bool:
        on = [kind for kind in self.device_types if torch.is_autocast_enabled(kind)]
        dtypes = [torch.get_autocast_dtype(kind) for kind in on]
        return dtypes == [self.dtype] * len(self.device_types)


@dataclass(frozen=True, slots=True)
class _EnterPlain(EngineHook):
    """Forward pre-hook that takes a model out of the casts of other engines."""

    @not_compiled_alone
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            if not (PUSHED or any(map(torch.is_autocast_enabled, _COMMON))):
                return
        elif not (CASTS.brackets or CASTS.pushes):  # as in most programs
            return
        _enter_plain(module)


@dataclass(frozen=True, slots=True)
class _Leave(EngineHook):
    """Forward hook that closes what the pre-hook of the same module call opened."""

    @not_compiled_alone
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (FORWARDS_OPEN if torch.compiler.is_compiling() else CASTS.brackets):
            return
        _leave(module)


def _attach(module: nn.Module, enter: _EnterCasts | _EnterPlain, undo: UndoStack) -> None:
    def leave() -> None:
        if (alive := weak()) is not None:  # in a forward on this thread, the hook is gone
            _leave(alive)

    weak = weakref.ref(module)
    undo.push(leave)
    # The region opens before other pre-hooks run and closes after other hooks have run, so an
    # exception in one of them finds it open and closes it.
    add_hook(module, "register_forward_pre_hook", enter, undo, prepend=True)
    add_hook(module, "register_forward_hook", _Leave(), undo, always_call=True)


def attach_cast_region(
    module: nn.Module, device_types: frozenset[str], dtype: torch.dtype, undo: UndoStack
) -> None:
    """Run forwards of ``module`` in an autocast region with its weight cache; adds hooks only."""
    know_device_types(device_types)
    _attach(module, _EnterCasts(tuple(sorted(device_types)), dtype), undo)


def attach_plain_region(module: nn.Module, undo: UndoStack) -> None:
    """Run forwards of ``module`` untouched by other engines' casts, but not the user's autocast."""
    _attach(module, _EnterPlain(), undo)
