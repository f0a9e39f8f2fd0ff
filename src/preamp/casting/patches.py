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
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from preamp.casting.lock import PATCH_LOCK
from preamp.core.undo import Removable, UndoOnce
from preamp.kernels.scripting import scriptable

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
