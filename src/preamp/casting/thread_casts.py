# SPDX-License-Identifier: BSD-3-Clause
"""Which casts hold on a thread: those of the brackets that are open, else thread-wide ones.

A *bracket* is a stretch of code that sets torch's own thread-local autocast state, and the state to
go back to: a model's forward, a ``disable_casts`` block, a backward pass. They are a stack.

*Thread-wide* casts (`push_thread_casts`) set no state. They are a list, which any thread may change
at any time, and act where nothing else decides: outside of brackets and of ``torch.autocast``
blocks of the user's own. A wrapped function that finds no autocast there opens a bracket for its
own call (`call_in_thread_casts`), as Apex's functions looked at their handle. So there is nothing
to take back from a thread when an engine is closed on another one, or collected.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from preamp.casting.autocast_state import (
    AutocastState,
    is_any_autocast_on,
    know_device_types,
    nesting,
    untraced,
)
from preamp.core.torch_private.modules import call_hooks_after_interrupts
from preamp.core.undo import UndoStack, append, finished


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    device_types: frozenset[str]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Bracket:
    """A stretch of code with an autocast state of its own, and the state to go back to."""

    saved: AutocastState
    outside: int  # torch's count of autocast regions around the bracket
    module_id: int | None = None  # whose forward it is; None for disable_casts and backward
    is_region: bool = False  # whether it counts as one itself

    @property
    def inside(self) -> int:
        """The count inside of it; more means that the user opened a region there."""
        return self.outside + self.is_region


class _Casts(threading.local):
    """What preamp did to the calling thread's autocast state."""

    def __init__(self) -> None:
        # Of engines that are alive and have functions cast on this thread outside of models
        self.pushes: list[_Push] = []
        self.brackets: list[Bracket] = []
        self.disabled: Bracket | None = None  # the outermost disable_casts


CASTS: Final = _Casts()

PUSHED: Final[list[_Push]] = []
"""The thread-wide casts of all threads; wrappers, which ``torch.compile`` traces and which cannot
look at a thread's own, ask whether it is empty."""


# --- brackets ---

FORWARDS_OPEN: Final[list[Bracket]] = []
"""The open brackets of forwards of all threads; code under torch.compile, which cannot look at a
thread's own, asks whether it is empty."""


@finished
def unwind_to(depth: int) -> None:
    """Close brackets, the innermost first, until ``depth`` of this thread are left."""
    brackets = CASTS.brackets
    while len(brackets) > depth:
        top = brackets[-1]
        if top.is_region and nesting() >= top.inside:  # else it was interrupted before, or here
            torch.autocast_decrement_nesting()
            top.is_region = False
        if top.module_id is not None:
            if top in FORWARDS_OPEN:
                FORWARDS_OPEN.remove(top)
            torch.clear_autocast_cache()
        top.saved.restore()
        brackets.pop()  # last: interrupted before, it is closed once more
        if top.module_id is not None:
            _catch_interrupts()


def _catch_interrupts() -> None:
    if not FORWARDS_OPEN:
        call_hooks_after_interrupts(False)
    if FORWARDS_OPEN:  # perhaps another thread's since
        call_hooks_after_interrupts(True)


def open_bracket(module: nn.Module | None) -> Bracket:
    """Begin a bracket, for a forward of ``module`` or code that always closes it; sets nothing."""
    bracket = Bracket(AutocastState.capture(), nesting(), None if module is None else id(module))
    if module is not None:
        call_hooks_after_interrupts(True)  # first, so that one from here on closes the bracket
    CASTS.brackets.append(bracket)
    if module is not None:
        FORWARDS_OPEN.append(bracket)
        _catch_interrupts()
    return bracket


@contextlib.contextmanager
def autocast_off() -> Generator[None]:
    """Run the block with autocast disabled on every device type, then set the state back."""
    depth = len(CASTS.brackets)
    try:
        open_bracket(None).saved.without_casts().restore()
        yield
    finally:
        unwind_to(depth)


# --- thread-wide casts ---


def push_thread_casts(device_types: Iterable[str], dtype: torch.dtype, undo: UndoStack) -> None:
    """Cast functions that the calling thread calls outside of models too, until ``undo``.

    Of several casts the latest hold. They may end in any order, on any thread, in the middle of
    whatever their own thread does: they hold for no function that is called afterwards. Weights are
    cast in each call, without torch's cache.
    """
    know_device_types(device_types)
    push = _Push(frozenset(device_types), dtype)
    for pushes in (CASTS.pushes, PUSHED):
        append(pushes, push, undo)


def thread_casts_act() -> bool:
    """Whether a function that is called here is cast by thread-wide casts."""
    return bool(CASTS.pushes) and not CASTS.brackets and not nesting()


def is_any_casting() -> bool:
    """Whether a function that is called here is cast, by an engine or the user's own autocast."""
    return is_any_autocast_on() or thread_casts_act()


def call_in_thread_casts(casting: Any, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call ``casting`` in a bracket with the thread-wide casts where they act, else ``fn``.

    Code under ``torch.compile`` is left for it, since the compiler cannot look at a thread's own.
    """
    call = _call_untraced if torch.compiler.is_compiling() else _call
    return call(casting, fn, args, kwargs)


def _call(casting: Any, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if not thread_casts_act():
        return fn(*args, **kwargs)
    try:
        on = {kind: (True, push.dtype) for push in (*CASTS.pushes,) for kind in push.device_types}
        # As `open_bracket`, of these device types alone
        CASTS.brackets.append(Bracket(AutocastState.capture(on), 0))
        AutocastState(on, False).restore()
        return casting(*args, **kwargs)
    finally:
        unwind_to(0)


_call_untraced = untraced(_call)


@contextlib.contextmanager
def disable_casts() -> Generator[None]:
    """Run the block without casts on this thread: functions as written, models as stored.

    Nests, and ends properly on exceptions. Where no engine is alive it changes nothing: an
    autocast region of the user's own stays on.
    """
    depth, disabled = len(CASTS.brackets), CASTS.disabled
    try:
        _disable()
        yield
    finally:
        _enable(depth, disabled)


@untraced
def _disable() -> None:
    bracket = open_bracket(None)
    CASTS.disabled = CASTS.disabled or bracket
    if CASTS.pushes or len(CASTS.brackets) > 1:
        bracket.saved.without_casts().restore()


@untraced
@finished
def _enable(depth: int, disabled: Bracket | None) -> None:
    unwind_to(depth)
    CASTS.disabled = disabled


@contextlib.contextmanager
def thread_casts_restored() -> Generator[None]:
    """In ``disable_casts``, run the block as outside of it, as for an optimizer's closure."""
    disabled, brackets, before = CASTS.disabled, CASTS.brackets, AutocastState.capture()
    try:
        if disabled is not None:
            CASTS.disabled, CASTS.brackets = None, brackets[: brackets.index(disabled)]
            _set_state(disabled.saved)
        yield
    finally:
        CASTS.disabled, CASTS.brackets = disabled, brackets
        _set_state(before)


_set_state = untraced(AutocastState.restore)


# --- forked processes ---


def _end_casts_in_fork() -> None:
    """Start without casts in a forked process, such as a ``DataLoader``'s worker.

    Nobody asked for them there, and started by ``spawn`` it would have none.
    """
    unwind_to(0)
    CASTS.disabled = None
    for entries in (FORWARDS_OPEN, CASTS.pushes, PUSHED):  # the other threads are not here
        entries.clear()
    call_hooks_after_interrupts(False)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_end_casts_in_fork)
