# SPDX-License-Identifier: BSD-3-Clause
"""Attributes replaced in layers, and put back exactly.

Several parties wrap the same function (the op table, wide half products, a user's registration)
and leave in any order, so nobody may simply save and restore "the previous value". Each patched
attribute therefore keeps its original and its layers; the value that is set is always the original
wrapped by the layers in order of their rank, and without layers the original is put back: the same
object, or no entry at all where the attribute was inherited.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
import types
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, cast

from preamp.core.torch_private.scripting import forget_traced_names, know_traced_names, scriptable
from preamp.core.undo import UndoStack

P = ParamSpec("P")
R = TypeVar("R")
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_ABSENT: Final = object()


class Rank(enum.IntEnum):
    """Order of layers on one function; the smallest is innermost."""

    WIDE = 0
    MIXED = 1
    TABLE = 2
    # A name has one rule: a registration replaces the table's, and an earlier registration.
    REGISTERED = 3
    # Looks on from outside and changes nothing.
    PROBE = 4


@dataclass(slots=True)
class _Patched:
    owner: Any
    name: str
    original: object  # the entry in the owner's own __dict__, or _ABSENT
    raw: object  # what look-up finds without binding, perhaps inherited
    layers: list[tuple[Rank, Wrapper, object]] = field(
        default_factory=list["tuple[Rank, Wrapper, object]"]
    )


def _raw_attribute(owner: Any, name: str) -> object:
    if isinstance(owner, type):
        return inspect.getattr_static(owner, name)
    return getattr(owner, name)


def wrap_raw(raw: object, wrap: Wrapper) -> object:
    """Wrap the callable in ``raw``; a static or class method stays one."""
    # Called through the class, it must not be bound as a plain function would be.
    if isinstance(raw, staticmethod):
        return staticmethod(wrap(cast("staticmethod[..., Any]", raw).__func__))
    if isinstance(raw, classmethod):
        return classmethod(wrap(cast("classmethod[Any, ..., Any]", raw).__func__))
    return wrap(cast("Callable[..., Any]", raw))


def _prepare_for_others(function: types.FunctionType, patched: _Patched) -> types.FunctionType:
    """Let ``function`` be scripted as what it replaces, and pickle as what it is found as."""
    owner = patched.owner
    if isinstance(owner, types.ModuleType):
        function = scriptable(function, patched.raw)
        function.__module__, function.__qualname__ = owner.__name__, patched.name
    elif isinstance(owner, type):
        function.__module__ = owner.__module__
        function.__qualname__ = f"{owner.__qualname__}.{patched.name}"
    return function


class PatchLock:
    """A re-entrant lock with jobs that run when nobody is in the middle of a change.

    An engine that nobody refers to any more is collected on whichever thread allocates next,
    perhaps on one that holds this lock and is half-way through a change. Waiting there would be a
    deadlock, and running there would change a list while it is being sorted. So a finalizer hands
    its work in, and whoever holds the lock does it on the way out.

    Nothing is noted here but what the lock knows itself, and it is taken and released by C code
    alone, so that no interrupt can come between.
    """

    def __init__(self) -> None:
        """Start unlocked, with nothing to do."""
        self._lock = threading.RLock()
        self._jobs: deque[Callable[[], None]] = deque()

    def held(self, change: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``change`` to hold the lock; the holder may enter again.

        The outermost end runs the jobs that came meanwhile.
        """

        @functools.wraps(change)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with self._lock:
                    return change(*args, **kwargs)
            finally:
                self._run_unless_held()

        return call

    def run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job`` now if the lock is free, else leave it to the holder; never waits."""
        self._jobs.append(job)
        self._run_unless_held()

    def _run_unless_held(self) -> None:
        while self._jobs and not self._is_held_here():
            try:
                if not self._lock.acquire(blocking=False):
                    return
                while self._jobs:
                    self._jobs[0]()
                    self._jobs.popleft()  # not before, in case it is interrupted
            finally:
                try:
                    self._lock.release()
                except RuntimeError:  # another thread has it
                    pass

    def _is_held_here(self) -> bool:
        """Whether this thread has the lock, asked as ``threading.Condition`` does."""
        return cast("Any", self._lock)._is_owned()  # noqa: SLF001


PATCH_LOCK: Final = PatchLock()
"""Held during every change to the table of patches and to the counts of who wants them."""


class PatchTable:
    """The attributes that are patched at the moment, process-wide."""

    def __init__(self) -> None:
        self._patched: dict[tuple[int, str], _Patched] = {}

    def add(self, owner: Any, name: str, rank: Rank, wrap: Wrapper, undo: UndoStack) -> None:
        """Put a layer on ``owner.name``, made by ``wrap`` from the callable below it.

        ``owner`` is a module, class or instance that has the attribute, perhaps by inheritance.
        Of equal ranks the newer layer is outside. What cannot be set raises ``AttributeError``,
        and ``TypeError`` if ``owner`` is a type of C's or has no attributes of its own; then too
        ``undo`` has to be unwound.
        """
        token = object()
        key = (id(owner), name)
        undo.push(partial(self._remove, key, token))
        self._add(key, owner, (rank, wrap, token))

    @PATCH_LOCK.held
    def _add(self, key: tuple[int, str], owner: Any, layer: tuple[Rank, Wrapper, object]) -> None:
        patched = self._patched.get(key)
        if patched is None:
            name = key[1]
            own = cast("dict[str, object]", vars(owner)).get(name, _ABSENT)
            patched = _Patched(owner, name, own, _raw_attribute(owner, name))
            self._patched[key] = patched
        patched.layers = sorted([*patched.layers, layer], key=lambda layer: layer[0])
        self._set(patched)

    @PATCH_LOCK.held
    def _remove(self, key: tuple[int, str], token: object) -> None:
        patched = self._patched.get(key)
        if patched is None:
            return
        patched.layers = [layer for layer in patched.layers if layer[2] is not token]
        self._set(patched)
        if not patched.layers:  # last, as it holds the original
            self._patched.pop(key, None)

    @staticmethod
    def _set(patched: _Patched) -> None:
        if not patched.layers:
            own = cast("dict[str, object]", vars(patched.owner))
            if own.get(patched.name, _ABSENT) is patched.original:
                return
            if patched.original is _ABSENT:
                delattr(patched.owner, patched.name)
            else:
                setattr(patched.owner, patched.name, patched.original)
            return
        rules = [layer for layer in patched.layers if layer[0] in (Rank.TABLE, Rank.REGISTERED)]
        value = patched.raw
        for layer in patched.layers:
            if layer not in rules[:-1]:
                value = wrap_raw(value, layer[1])
        if isinstance(value, types.FunctionType):
            value = _prepare_for_others(value, patched)
        setattr(patched.owner, patched.name, value)


PATCHES: Final = PatchTable()
"""The one table of patched attributes: attributes of torch are process-wide, so this must be."""


Builder = Callable[[UndoStack], None]


class SharedInstall:
    """Patches that are on while anybody holds them."""

    def __init__(self, build: Builder) -> None:
        """``build`` makes the patches, and adds what takes them off before it does."""
        self._build = build
        self._holders: set[object] = set()
        self._undo = UndoStack()
        self._is_complete = False
        self.extras: dict[Hashable, Builder] = {}  # what `extend` adds
        self._compiler_knows = False

    @property
    def is_installed(self) -> bool:
        """Whether anybody holds the patches now."""
        return bool(self._holders)

    def acquire(self, undo: UndoStack) -> None:
        """Hold the patches until ``undo``; the first holder installs, the last removes them."""
        holder = object()
        undo.push(partial(self._release, holder))
        self._hold(holder)

    @PATCH_LOCK.held
    def _hold(self, holder: object) -> None:
        self._holders.add(holder)
        if self._is_complete:
            return
        self._undo.unwind()  # of an interrupted holder before
        self._compiler_knows = know_traced_names()
        self._undo.push(self._forget_names)
        self._build(self._undo)
        for build in self.extras.values():
            build(self._undo)
        self._is_complete = True

    def _forget_names(self) -> None:
        if not self._compiler_knows:
            forget_traced_names()

    @PATCH_LOCK.held
    def _release(self, holder: object) -> None:
        self._holders.discard(holder)
        if not self._holders:
            self._is_complete = False
            self._undo.unwind()

    @PATCH_LOCK.held
    def extend(self, key: Hashable, build: Builder) -> None:
        """Add a patch to this and all later installations; later, the latest of a ``key``."""
        self.extras[key] = build
        if self._holders:
            build(self._undo)
