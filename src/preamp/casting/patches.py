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
import inspect
import threading
import types
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from preamp.core.undo import Removable, UndoOnce
from preamp.kernels.scripting import forget_traced_names, know_traced_names, scriptable

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_ABSENT: Final = object()


class Rank(enum.IntEnum):
    """Order of layers on one function; the smallest is innermost."""

    WIDE = 0
    MIXED = 1
    TABLE = 2
    # A registration replaces the table's rule for that name, so TABLE layers below it are dropped.
    REGISTERED = 3
    # What prints the casts of the layers below, or of torch's autocast; replaced likewise.
    REPORT = 4
    REGISTERED_REPORT = 5
    # Looks on from outside and changes nothing.
    PROBE = 6


_REPLACED_BY: Final = {Rank.TABLE: Rank.REGISTERED, Rank.REPORT: Rank.REGISTERED_REPORT}


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
    # A static or class method stays one: called through the class, it must not be bound as a
    # plain function would be.
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


class PatchTable:
    """The attributes that are patched at the moment, process-wide."""

    def __init__(self) -> None:
        self._patched: dict[tuple[int, str], _Patched] = {}

    def add(self, owner: Any, name: str, rank: Rank, wrap: Wrapper) -> Removable:
        """Put a layer on ``owner.name``, made by ``wrap`` from the callable below it.

        ``owner`` is a module, class or instance that has the attribute, perhaps by inheritance.
        Of equal ranks the newer layer is outside. What cannot be set raises ``AttributeError``,
        and ``TypeError`` if ``owner`` is a type of C's or has no attributes of its own.
        """
        token = object()
        key = (id(owner), name)
        with PATCH_LOCK:
            patched = self._patched.get(key)
            if patched is None:
                own = cast("dict[str, object]", vars(owner)).get(name, _ABSENT)
                patched = _Patched(owner, name, own, _raw_attribute(owner, name))
                self._patched[key] = patched
            patched.layers.append((rank, wrap, token))
            patched.layers.sort(key=lambda layer: layer[0])
            try:
                self._set(patched)
            except BaseException:
                patched.layers = [layer for layer in patched.layers if layer[2] is not token]
                if not patched.layers:
                    del self._patched[key]
                raise
        return UndoOnce(lambda: self._remove(key, token))

    def _remove(self, key: tuple[int, str], token: object) -> None:
        with PATCH_LOCK:
            patched = self._patched[key]
            patched.layers = [layer for layer in patched.layers if layer[2] is not token]
            if not patched.layers:
                del self._patched[key]
            self._set(patched)

    @staticmethod
    def _set(patched: _Patched) -> None:
        if not patched.layers:
            if patched.original is _ABSENT:
                delattr(patched.owner, patched.name)
            else:
                setattr(patched.owner, patched.name, patched.original)
            return
        ranks = {rank for rank, _, _ in patched.layers}
        value = patched.raw
        for rank, wrap, _ in patched.layers:
            if _REPLACED_BY.get(rank) in ranks:
                continue
            value = wrap_raw(value, wrap)
        if isinstance(value, types.FunctionType):
            value = _prepare_for_others(value, patched)
        setattr(patched.owner, patched.name, value)


PATCHES: Final = PatchTable()
"""The one table of patched attributes: attributes of torch are process-wide, so this must be."""


class PatchLock:
    """A re-entrant lock with jobs that run when nobody is in the middle of a change.

    An engine that nobody refers to any more is collected on whichever thread allocates next,
    perhaps on one that holds this lock and is half-way through a change. Waiting there would be a
    deadlock, and running there would change a list while it is being sorted. So a finalizer hands
    its work in, and whoever holds the lock does it on the way out.
    """

    def __init__(self) -> None:
        """Start unlocked, with nothing to do."""
        self._lock = threading.RLock()
        self._depth = 0  # changed only by the thread that holds the lock
        self._jobs: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock; the holder may enter again."""
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Leave; the outermost exit runs the jobs that came meanwhile."""
        try:
            if self._depth == 1:
                self._run_jobs()
        finally:
            self._depth -= 1
            self._lock.release()
        # One may have come between the last look and the release.
        self._run_unless_held()

    def run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job`` now if the lock is free, else leave it to the holder; never waits."""
        self._jobs.append(job)
        self._run_unless_held()

    def _run_unless_held(self) -> None:
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # held by this very thread, further up
                    return
                self._depth = 1
                try:
                    self._run_jobs()
                finally:
                    self._depth = 0
            finally:
                self._lock.release()

    def _run_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()


PATCH_LOCK: Final = PatchLock()
"""Held during every change to the table of patches and to the counts of who wants them."""


Builder = Callable[[], Removable]


class SharedInstall:
    """Patches that are on while anybody holds them."""

    def __init__(self, build: Callable[[], list[Removable]]) -> None:
        self._build = build
        self._holders = 0
        self._handles: list[Removable] = []
        self._extras: dict[Hashable, Builder] = {}
        self._extra_handles: dict[Hashable, Removable] = {}
        self._compiler_knows = False

    @property
    def is_installed(self) -> bool:
        """Whether anybody holds the patches now."""
        return self._holders > 0

    def acquire(self) -> Removable:
        """Hold the patches; the first holder installs them, the last one removes them."""
        with PATCH_LOCK:
            if not self._holders:
                self._install()
            self._holders += 1
        return UndoOnce(self._release)

    def _install(self) -> None:
        self._compiler_knows = know_traced_names()
        self._handles = self._build()
        try:
            for key, make in self._extras.items():
                self._extra_handles[key] = make()
        except BaseException:
            self._remove_all()
            raise

    def _remove_all(self) -> None:
        for handle in (*self._extra_handles.values(), *self._handles):
            handle.remove()
        self._extra_handles, self._handles = {}, []
        if not self._compiler_knows:
            forget_traced_names()

    def _release(self) -> None:
        with PATCH_LOCK:
            self._holders -= 1
            if not self._holders:
                self._remove_all()

    def extend(self, key: Hashable, build: Builder) -> None:
        """Add a patch to this and all later installations; a known ``key`` is replaced."""
        with PATCH_LOCK:
            self._extras[key] = build
            if self._holders:
                known = self._extra_handles.pop(key, None)
                if known is not None:
                    known.remove()
                self._extra_handles[key] = build()

    def discard(self, key: Hashable) -> None:
        """Forget what ``extend`` added under ``key``."""
        with PATCH_LOCK:
            self._extras.pop(key, None)
            known = self._extra_handles.pop(key, None)
            if known is not None:
                known.remove()
