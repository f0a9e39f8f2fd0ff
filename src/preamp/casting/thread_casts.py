# SPDX-License-Identifier: BSD-3-Clause
"""What preamp did to a thread's autocast state, and how it is taken back.

Everything here only sets torch's own thread-local autocast state and puts it back. What has to be
put back is kept per thread, as a stack of brackets (model forwards and ``disable_casts`` blocks)
over the thread-wide casts of ``push_thread_casts``.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Final

import torch
from torch import nn

from preamp.casting.autocast_state import AutocastState, know_device_types, nesting, untraced
from preamp.casting.removable import UndoOnce
from preamp.core.undo import Removable


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    device_types: frozenset[str]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Bracket:
    """A stretch of code with an autocast state of its own, and the state to go back to."""

    saved: AutocastState
    nesting: int  # torch's count inside the bracket; more means that the user opened a region
    module_id: int | None = None  # whose forward it is; None for disable_casts
    frame: FrameType | None = None
    raised_nesting: bool = False


class _Pushes(list[_Push]):
    """The thread-wide casts of one thread; ``is_stale`` after another thread removed some."""

    is_stale = False


class _Casts(threading.local):
    """What preamp did to the calling thread's autocast state."""

    def __init__(self) -> None:
        self.pushes = _Pushes()
        self.original: AutocastState | None = None  # before the first push
        self.base_nesting = 0
        self.brackets: list[Bracket] = []
        self.disabled: AutocastState | None = None  # the state before the outermost disable_casts


CASTS: Final = _Casts()


# --- brackets ---


def unwind_to(bracket: Bracket) -> None:
    """Close ``bracket`` and whatever was left open inside it."""
    brackets = CASTS.brackets
    while brackets:
        top = brackets.pop()
        if top.raised_nesting:
            torch.autocast_decrement_nesting()
        if top.module_id is not None:
            # Cheap, and right even if the count above was disturbed: a weight that is still
            # needed is cast again.
            torch.clear_autocast_cache()
        top.saved.restore()
        if top is bracket:
            return


def _drop_abandoned() -> None:
    """Close brackets whose forward is over.

    torch calls ``always_call`` hooks for ``Exception`` only, so a forward that ends in a
    ``KeyboardInterrupt`` leaves its bracket open, and with it the casts and the weight cache.
    """
    running: set[FrameType] = set()
    frame = inspect.currentframe()
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    for bracket in CASTS.brackets:
        if bracket.frame is not None and bracket.frame not in running:
            unwind_to(bracket)
            return


def open_bracket(module: nn.Module) -> Bracket:
    """Begin a forward of ``module`` on this thread; the autocast state is not changed yet."""
    if CASTS.pushes.is_stale:
        _settle_base()
    if CASTS.brackets:
        _drop_abandoned()
    # The frame that lives as long as the forward; where torch renames it, nothing is ever dropped.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    bracket = Bracket(AutocastState.capture(), nesting(), id(module), frame)
    CASTS.brackets.append(bracket)
    return bracket


# --- thread-wide casts ---


def _set_base(state: AutocastState) -> None:
    """Make ``state`` what holds outside all brackets of this thread."""
    if CASTS.brackets:
        CASTS.brackets[0].saved = state
    else:
        state.restore()


def _base() -> AutocastState | None:
    state = CASTS.original
    if state is not None:
        for push in CASTS.pushes:
            state = state.casting(push.device_types, push.dtype, cache_enabled=False)
    return state


def push_thread_casts(device_types: Iterable[str], dtype: torch.dtype) -> Removable:
    """Turn casts on for the calling thread, outside models too, until the result is removed.

    torch's count of nested regions is not raised, so the weight cache of a model's forward is
    still cleared when that forward ends; out here the cache is off.

    Args:
        device_types: Device types whose tensors are cast.
        dtype: The half dtype.

    Returns:
        A handle to remove on the same thread, in any order with other handles. After the last one
        the thread's autocast state is what it was before the first. On another thread ``remove``
        forgets these casts, and this thread follows when it next enters or leaves a model.
    """
    types = frozenset(device_types)
    know_device_types(types)
    if CASTS.original is None:
        outside = CASTS.brackets[0].saved if CASTS.brackets else AutocastState.capture()
        CASTS.original, CASTS.base_nesting = outside, nesting()
    push = _Push(types, dtype)
    CASTS.pushes.append(push)
    base = _base()
    if base is not None:
        _set_base(base)
    return UndoOnce(_PopPush(push, CASTS.pushes, threading.get_ident()))


@dataclass(frozen=True, slots=True)
class _PopPush:
    push: _Push
    pushes: _Pushes
    thread_id: int

    def __call__(self) -> None:
        self.pushes.remove(self.push)
        self.pushes.is_stale = True
        if self.thread_id == threading.get_ident():
            _settle_base()


def _settle_base() -> None:
    """Bring the base in line with the pushes that are left."""
    CASTS.pushes.is_stale = False
    base = _base()
    if base is not None:
        _set_base(base)
        if not CASTS.pushes:
            CASTS.original = None


# --- casts off ---


@contextlib.contextmanager
def disable_casts() -> Generator[None]:
    """Run the block without casts on this thread: functions as written, models as stored.

    Nests, and ends properly on exceptions. Where no engine is alive it changes nothing: an
    autocast region of the user's own stays on.
    """
    bracket, outermost = _disable()
    try:
        yield
    finally:
        _enable(bracket, outermost)


@untraced
def _disable() -> tuple[Bracket, bool]:
    if CASTS.pushes.is_stale:
        _settle_base()
    before = AutocastState.capture()
    outermost = CASTS.disabled is None
    if outermost:
        CASTS.disabled = before
    if CASTS.pushes or CASTS.brackets:
        before.without_casts().restore()
    bracket = Bracket(before, nesting())
    CASTS.brackets.append(bracket)
    return bracket, outermost


@untraced
def _enable(bracket: Bracket, outermost: bool) -> None:
    unwind_to(bracket)
    if outermost:
        CASTS.disabled = None


@contextlib.contextmanager
def thread_casts_restored() -> Generator[None]:
    """Inside ``disable_casts``: run the block as if outside of it; elsewhere change nothing.

    For a closure that an optimizer step, which runs without casts, calls back.
    """
    disabled = CASTS.disabled
    before = _restore_casts(disabled)
    try:
        yield
    finally:
        CASTS.disabled = disabled
        _set_state(before)


@untraced
def _restore_casts(disabled: AutocastState | None) -> AutocastState:
    before = AutocastState.capture()
    if disabled is not None:
        CASTS.disabled = None
        disabled.restore()
    return before


@untraced
def _set_state(state: AutocastState) -> None:
    state.restore()
