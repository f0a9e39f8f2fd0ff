# SPDX-License-Identifier: BSD-3-Clause
"""What preamp did to a thread's autocast state, and how it is taken back.

Everything here only sets torch's own thread-local autocast state and puts it back. What has to be
put back is kept per thread, as a stack of brackets (model forwards, ``disable_casts`` blocks and
backward passes) over the thread-wide casts of ``push_thread_casts``: the base.

The base may have to change when it cannot: its engine is closed on another thread, or collected, or
closed inside a bracket or a ``torch.autocast`` block of the user's own, which must not be flipped.
The casts are then *stale*, and ``settle_thread`` brings the base in line as soon as this thread
enters preamp again where it can. While any thread's casts are stale the wrappers of functions stay
where they are: they are entrances too, so what is cast no more is not cast by the next function
either.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Final

import torch
from torch import nn

from preamp.casting import autocast_state
from preamp.casting.autocast_state import (
    AutocastState,
    Devices,
    know_device_types,
    nesting,
    states_of,
    untraced,
)
from preamp.casting.patches import PATCH_LOCK
from preamp.core.torch_private.modules import call_hooks_after_interrupts
from preamp.core.undo import UndoStack


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    device_types: frozenset[str]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Bracket:
    """A stretch of code with an autocast state of its own, and the state to go back to."""

    saved: AutocastState
    nesting: int  # torch's count inside the bracket; more means that the user opened a region
    module_id: int | None = None  # whose forward it is; None for disable_casts and backward
    frame: FrameType | None = None
    raised_nesting: bool = False
    is_counted: bool = False  # in `FORWARDS_OPEN`


STALE: Final[list[object]] = []
"""One entry for each thread whose base does not follow its thread-wide casts; wrappers, which
``torch.compile`` traces, ask whether it is empty."""

_WAITING: Final[deque[Callable[[], None]]] = deque()


def when_settled(job: Callable[[], None]) -> None:
    """Run ``job``, which may run twice, as soon as no thread's casts are stale."""
    _WAITING.append(job)
    _run_waiting()


def _run_waiting() -> None:
    while _WAITING and not STALE:
        job = _WAITING[0]
        PATCH_LOCK.run_or_leave(job)
        with contextlib.suppress(ValueError):  # another thread was faster
            _WAITING.remove(job)  # not before, in case it is interrupted


class _Pushes(list[_Push]):
    """The thread-wide casts of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stale = False
        self._entry = object()
        # As a thread that ends is stale no more
        weakref.finalize(self, _take_away, self._entry).atexit = False

    def mark_stale(self) -> None:
        """Note that the base does not follow these casts."""
        self.is_stale = True
        STALE.append(self._entry)

    def mark_settled(self) -> None:
        """Note that the base followed them, unless another thread has changed them since."""
        if not self.is_stale:
            _take_away(self._entry)
            if self.is_stale:
                STALE.append(self._entry)


def _take_away(entry: object) -> None:
    while entry in STALE:
        with contextlib.suppress(ValueError):
            STALE.remove(entry)
    _run_waiting()


class _Casts(threading.local):
    """What preamp did to the calling thread's autocast state."""

    def __init__(self) -> None:
        self.pushes = _Pushes()
        self.original: Devices = {}  # before the first push, by the device types of all pushes
        self.applied: Devices = {}  # the same, as it was last set
        self.had_cache = True  # before the first push
        self.base_nesting = 0
        self.brackets: list[Bracket] = []
        self.disabled: Bracket | None = None  # the outermost disable_casts


CASTS: Final = _Casts()


# --- brackets ---

FORWARDS_OPEN: Final[list[int]] = []
"""One entry for each open bracket of a forward, of all threads; code under torch.compile, which
cannot look at a thread's own, asks whether it is empty."""


def unwind_to(bracket: Bracket) -> None:
    """Close ``bracket`` and whatever was left open inside it."""
    brackets = CASTS.brackets
    while brackets:
        top = brackets[-1]
        if top.raised_nesting:
            top.raised_nesting = False
            torch.autocast_decrement_nesting()
        if top.module_id is not None:
            if top.is_counted and FORWARDS_OPEN:
                top.is_counted = False
                FORWARDS_OPEN.pop()
            # Cheap, and right even if the count above was disturbed: a weight that is still
            # needed is cast again.
            torch.clear_autocast_cache()
        top.saved.restore()
        brackets.pop()  # last: interrupted before, it is closed once more
        _catch_interrupts(any(one.module_id is not None for one in brackets))
        if top is bracket:
            break
    if CASTS.pushes.is_stale:
        _settle_base()


def _catch_interrupts(are_forwards_open: bool) -> None:
    if threading.get_ident() == threading.main_thread().ident:  # no other is interrupted
        call_hooks_after_interrupts(are_forwards_open)


def _drop_abandoned() -> None:
    """Close brackets whose forward is over.

    An interrupt that comes while a hook of this room runs leaves its bracket open, and with it the
    casts and the weight cache.
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


def open_bracket(module: nn.Module | None) -> Bracket:
    """Begin a bracket, for a forward of ``module`` or code that always closes it; sets nothing."""
    _settle()
    frame = None
    if module is not None:
        # The one that lives as long as the forward; where torch renames it, nothing is dropped.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "_call_impl":
            frame = frame.f_back
    module_id = None if module is None else id(module)
    bracket = Bracket(AutocastState.capture(), nesting(), module_id, frame)
    CASTS.brackets.append(bracket)
    if module is not None:
        FORWARDS_OPEN.append(bracket.nesting)
        bracket.is_counted = True
        _catch_interrupts(True)
    return bracket


@contextlib.contextmanager
def autocast_off() -> Generator[None]:
    """Run the block with autocast disabled on every device type, then set the state back."""
    bracket = open_bracket(None)
    bracket.saved.without_casts().restore()
    try:
        yield
    finally:
        unwind_to(bracket)


# --- thread-wide casts ---


def push_thread_casts(device_types: Iterable[str], dtype: torch.dtype, undo: UndoStack) -> None:
    """Turn casts on for the calling thread, outside models too, until ``undo``.

    torch's count of nested regions is not raised, so the weight cache of a model's forward is
    still cleared when that forward ends; out here the cache is off.

    Casts may end in any order, on any thread. After the last ``undo`` the thread's autocast
    state is what it was before the first: at once if this thread calls it, outside of forwards,
    ``disable_casts`` and ``torch.autocast`` blocks opened since; else when it next enters or leaves
    preamp.
    """
    types = frozenset(device_types)
    know_device_types(types)
    settle_thread()
    push = _Push(types, dtype)
    undo.push(functools.partial(_pop, push, CASTS.pushes))
    CASTS.pushes.append(push)
    CASTS.pushes.is_stale = True
    _settle_base()


def _pop(push: _Push, pushes: _Pushes) -> None:
    if push in pushes:
        pushes.remove(push)
    pushes.mark_stale()
    if pushes is CASTS.pushes and not _is_changing_state():
        _settle_base()


def _is_changing_state() -> bool:
    """Whether a caller, as seen from the garbage collector, is half-way through a change.

    A collected engine's casts are popped wherever Python happens to be: if ``torch.autocast`` or
    this room has just read the state to put it back later, setting it now would be undone then.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # popping is not such a change itself
        frame = frame and frame.f_back
    while frame is not None:
        if frame.f_globals.get("__name__") in _STATE_MODULES:
            return True
        frame = frame.f_back
    return False


_STATE_MODULES: Final = frozenset({__name__, autocast_state.__name__, torch.autocast.__module__})


def thread_has_casts() -> bool:
    """Whether an engine that is alive has functions cast on this thread, in models or outside."""
    return bool(CASTS.pushes)


def thread_is_plain() -> bool:
    """Whether no engine casts functions on this thread, so a plain forward has nothing to do."""
    return not (CASTS.brackets or CASTS.pushes or CASTS.pushes.is_stale)


def plain_state() -> AutocastState:
    """The state without the casts of any engine; to be asked within a bracket."""
    return CASTS.brackets[0].saved.changed(CASTS.original)


def settle_thread() -> None:
    """Bring this thread's autocast state in line with what is still open and alive.

    Closes forwards that were interrupted at a hook, and follows engines that were closed or
    collected. Within a forward, a ``torch.autocast`` block of the user's own or ``disable_casts``
    that waits for the next call; a state that the user set by hand stays. Every entrance to
    preamp calls this; where there is nothing to do it costs two look-ups.
    """
    if CASTS.brackets or CASTS.pushes.is_stale:
        _settle_untraced()


def _settle() -> None:
    if CASTS.brackets:
        _drop_abandoned()
    if CASTS.pushes.is_stale:
        _settle_base()


_settle_untraced = untraced(_settle)


def _settle_base() -> None:
    """Bring the base in line with the pushes, if the thread is there."""
    has_followed = False
    try:
        # First, since other threads take pushes away at any time, and mark them stale afterwards.
        CASTS.pushes.is_stale = False
        has_followed = _follow_pushes()
    finally:
        if not has_followed:
            CASTS.pushes.mark_stale()
    CASTS.pushes.mark_settled()


def _follow_pushes() -> bool:
    """Set the base as the pushes want it; not within anything that will set its own state back."""
    depth = nesting()
    if CASTS.brackets or (CASTS.original and depth > CASTS.base_nesting):
        return False
    if not CASTS.original or depth < CASTS.base_nesting:
        # Once a region of the user's around the first push has ended, torch has put its own back.
        CASTS.original, CASTS.applied = {}, {}
        CASTS.base_nesting, CASTS.had_cache = depth, torch.is_autocast_cache_enabled()
    pushes = tuple(CASTS.pushes)
    wanted = {kind: (True, push.dtype) for push in pushes for kind in push.device_types}
    now = states_of({*wanted, *CASTS.original})
    # What somebody has set by hand since it was last set here stays.
    ours = [kind for kind in now if CASTS.applied.get(kind, now[kind]) == now[kind]]
    CASTS.original = {kind: CASTS.original.get(kind, now[kind]) for kind in ours}
    base = {kind: wanted.get(kind, CASTS.original[kind]) for kind in ours}
    CASTS.applied = {}  # half-set where this is interrupted
    AutocastState(base, CASTS.had_cache and not pushes).restore()
    CASTS.applied = base
    if not pushes:
        CASTS.original, CASTS.applied = {}, {}
    return True


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
    bracket = open_bracket(None)
    outermost = CASTS.disabled is None
    if outermost:
        CASTS.disabled = bracket
    if CASTS.pushes or len(CASTS.brackets) > 1:
        bracket.saved.without_casts().restore()
    return bracket, outermost


@untraced
def _enable(bracket: Bracket, outermost: bool) -> None:
    unwind_to(bracket)
    if outermost:
        CASTS.disabled = None


@contextlib.contextmanager
def thread_casts_restored() -> Generator[None]:
    """In ``disable_casts``, run the block as outside of it, as for an optimizer's closure."""
    disabled = CASTS.disabled
    before = _restore_casts(disabled)
    try:
        yield
    finally:
        CASTS.disabled = disabled
        _set_state(before)


@untraced
def _restore_casts(disabled: Bracket | None) -> AutocastState:
    before = AutocastState.capture()
    if disabled is not None:
        CASTS.disabled = None
        disabled.saved.restore()
    return before


@untraced
def _set_state(state: AutocastState) -> None:
    state.restore()


# --- forked processes ---


def _end_casts_in_fork() -> None:
    """Start without casts in a forked process, such as a ``DataLoader``'s worker.

    Nobody asked for them there, and started by ``spawn`` it would have none.
    """
    if CASTS.brackets:
        unwind_to(CASTS.brackets[0])
    FORWARDS_OPEN.clear()  # the other threads are not here
    call_hooks_after_interrupts(False)
    CASTS.disabled = None
    CASTS.pushes.clear()
    STALE.clear()
    _settle_base()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_end_casts_in_fork)
