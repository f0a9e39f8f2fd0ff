# SPDX-License-Identifier: BSD-3-Clause
"""Turn the alias on and off."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from preamp.compat.alias.finder import (
    FINDER,
    ROOT,
    AliasLoader,
    find_elsewhere,
    import_children,
    is_apex,
    other_finders,
)
from preamp.compat.alias.table import SUPPLIED
from preamp.core.errors import bad_state

STARTUP = str(Path(__file__).with_name("startup"))
"""Folder of what child processes run when Python starts."""

_PATH = "PYTHONPATH"


def install_apex_alias() -> None:
    """Let ``import apex``, ``import amp_C`` and ``import apex_C`` mean preamp.

    Nothing is imported until one of the names is. Of an installed Apex that lacks ``apex.amp``
    everything stays as it is, and only what it lacks is supplied. Python processes started from
    now on see the alias too, spawned workers among them. Calling this again changes nothing.

    Raises:
        PreampStateError: The installed Apex has an ``apex.amp`` of its own, or something else was
            imported or put in place as ``apex``. Nothing was changed.

    Mutates:
        ``sys.meta_path``, and ``PYTHONPATH`` in ``os.environ``; `remove_apex_alias` restores both.
    """
    if FINDER in sys.meta_path:
        return
    _refuse_other_apex()
    sys.meta_path[:] = [FINDER, *other_finders()]
    entries = _entries()
    if STARTUP not in entries:
        os.environ[_PATH] = os.pathsep.join([STARTUP, *entries])
    if ROOT in sys.modules:
        import_children(ROOT)


def remove_apex_alias() -> None:
    """Take the alias away again; names that were imported under it stay usable.

    Calling this without the alias changes nothing. In a process that was started by one with the
    alias, it also takes away what that one passed on.

    Mutates:
        ``sys.modules``, ``sys.meta_path``, ``PYTHONPATH`` in ``os.environ``.
    """
    sys.meta_path[:] = other_finders()
    for name in reversed(SUPPLIED):
        module = sys.modules.get(name)
        if module is not None and isinstance(_loader(module), AliasLoader):
            del sys.modules[name]
            _forget_child(name, module)
    entries = _entries()
    if STARTUP in entries:
        entries.remove(STARTUP)
        os.environ[_PATH] = os.pathsep.join(entries)
        if not entries:
            del os.environ[_PATH]


def _refuse_other_apex() -> None:
    """Raise where the name ``apex`` is taken by what the alias must not replace."""
    if ROOT in sys.modules:
        loaded = cast("object", sys.modules[ROOT])
        locations, where = getattr(loaded, "__path__", None), getattr(loaded, "__file__", loaded)
        if not (isinstance(loaded, ModuleType) and is_apex(locations)):
            raise bad_state(
                f"The name apex already stands for something else in this process: {where}",
                "The alias supplies the name where it is free, or what an installed Apex lacks",
                "Call preamp.install_apex_alias() before anything imports or replaces apex",
            )
    else:
        spec = find_elsewhere(ROOT, None)
        if spec is None or not is_apex(spec.submodule_search_locations):
            return
        locations, where = spec.submodule_search_locations, spec.origin
    if f"{ROOT}.amp" in sys.modules or find_elsewhere(f"{ROOT}.amp", locations):
        raise bad_state(
            f"The Apex at {where} has an apex.amp of its own",
            "The alias supplies what an installed Apex lacks and replaces nothing",
            "Uninstall that Apex, or write: from preamp import amp",
        )


def _forget_child(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    holder = sys.modules.get(parent)
    if holder is not None and vars(holder).get(child) is module:
        delattr(holder, child)


def _loader(module: ModuleType) -> object:
    return getattr(getattr(module, "__spec__", None), "loader", None)


def _entries() -> list[str]:
    value = os.environ.get(_PATH, "")
    return value.split(os.pathsep) if value else []
