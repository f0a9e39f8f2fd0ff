# SPDX-License-Identifier: BSD-3-Clause
"""The import hook behind the alias, and the alias turned on and off.

An alias module is a module of its own that has the attributes of preamp's: its ``__name__`` and
``__spec__`` are Apex's, ``importlib.reload`` works, what the import system writes on it (its
sub-modules) does not reach preamp, and taking it away leaves no trace. Classes and functions are
preamp's own, so objects pickled under the alias load without it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from preamp.compat.alias.table import NEEDS_DISTRIBUTED, REFUSED, SUPPLIED
from preamp.core.errors import bad_state, worded

ROOT = "apex"

# Apex's version never changed from this one, which frameworks compare with.
_FILES = {
    "METADATA": f"""Metadata-Version: 2.1
Name: {ROOT}
Version: 0.1
Summary: preamp under the name apex
""",
    "top_level.txt": "apex\namp_C\napex_C\n",
}


class AliasDistribution(Distribution):
    """A distribution without files on the disk."""

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file such as ``METADATA``, or ``None`` if there is none."""
        return _FILES.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return ``path``; there is no folder that it could be relative to."""
        return Path(path)


_OF_THE_ALIAS = frozenset(
    {"__name__", "__spec__", "__loader__", "__package__", "__path__", "__cached__", "__builtins__"}
)
"""Attributes that an alias module does not take from preamp's."""


class AliasLoader(Loader):
    """Fills an alias module with the attributes of preamp's module ``target``."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        """Import preamp's module and the children, then copy the attributes."""
        source = importlib.import_module(self._target)
        import_children(module.__name__)
        # After the children: amp._amp_state is an object, although a child has the same name.
        modules = {
            name
            for name in getattr(source, "__all__", ())
            if f"{module.__name__}.{name}" not in SUPPLIED
        }
        vars(module).update(
            {
                name: value
                for name, value in vars(source).items()
                if name not in _OF_THE_ALIAS
                and (name in modules or not isinstance(value, ModuleType))
            }
        )
        vars(module)["__getattr__"] = functools.partial(_refuse_attribute, module.__name__)


class CompletingLoader(Loader):
    """Runs the code of an installed Apex by its ``own`` loader, then imports what it lacks."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        """Return what the package's loader can do besides loading: source, resources."""
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the package's loader make the module."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the installed ``apex``, with its own loader in its attributes, and complete it."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        import_children(module.__name__)


class AliasFinder(DistributionFinder):
    """Finds the modules of the table, and the distribution, wherever nothing else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Another finder's answer, else the alias; raises for names of Apex that preamp lacks."""
        if fullname not in SUPPLIED and fullname not in REFUSED:
            if not _is_below_alias(fullname) or find_elsewhere(fullname, path, target):
                return None
        found = find_elsewhere(fullname, path, target)
        if fullname == ROOT and found is not None:
            if is_apex(found.submodule_search_locations) and found.loader is not None:
                found.loader = CompletingLoader(found.loader)
                return found
        elif found is not None:
            return found
        refuse_missing(fullname)
        loader = AliasLoader(SUPPLIED[fullname])
        # Packages, all of them: of other modules Python asks no finder for names that are missing.
        return ModuleSpec(fullname, loader, origin=SUPPLIED[fullname], is_package=True)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """Yield the distribution ``apex``, unless one is installed or another is asked for."""
        asked: dict[str, Any] = {} if context is None else vars(context)
        if "path" in asked or (asked.get("name") or ROOT).lower() != ROOT:
            return
        if not any(_distributions_elsewhere()):
            yield AliasDistribution()


FINDER = AliasFinder()  # the one finder; the alias is on while ``sys.meta_path`` holds it

WAITS = "waits_for_apex"
"""Attribute of the finder that a child process starts with; see ``startup``."""


def other_finders() -> list[Any]:
    """The finders that know nothing of the alias."""
    return [f for f in sys.meta_path if f is not FINDER and not getattr(f, WAITS, False)]


def find_elsewhere(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """What other finders know of a module, not importing it; mere folders (a clone) are none."""
    for finder in other_finders():
        spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return None if spec.origin is None else spec
    return None


def is_apex(locations: Sequence[str] | None) -> bool:
    """Whether the ``apex`` there is Apex: the package index has another package of that name."""
    children = [name for name in (*SUPPLIED, *REFUSED) if name.count(".") == 1]
    return bool(locations) and any(find_elsewhere(name, locations) for name in children)


def import_children(parent: str) -> None:
    """Import the alias modules directly below ``parent`` that nothing else supplies."""
    path = list(getattr(sys.modules[parent], "__path__", ()))
    for name in SUPPLIED:
        if name.rpartition(".")[0] != parent or not _is_available(name):
            continue
        if find_elsewhere(name, path) is None:
            importlib.import_module(name)


def refuse_missing(name: str, kind: type[Exception] = ModuleNotFoundError) -> None:
    """Raise an error of ``kind`` for a name that cannot be had, saying what replaces it."""
    if name in SUPPLIED and _is_available(name):
        return
    # No name= on the error: with it, `from apex import mlp` would replace the text by its own.
    raise worded(
        kind, f"{name} is not supplied under the alias for Apex", _allowed(name), _advice(name)
    )


def _allowed(name: str) -> str:
    parent = name.rpartition(".")[0]
    own = getattr(sys.modules.get(parent), "__all__", None)
    if own is not None and name not in SUPPLIED:
        return f"{parent} has {', '.join(own)}"
    return (
        "preamp has apex.amp, apex.fp16_utils, apex.optimizers, apex.contrib.optimizers, "
        "apex.multi_tensor_apply, apex.parallel, apex.normalization, amp_C and apex_C"
    )


def _advice(name: str) -> str:
    if name in REFUSED:
        return f"Use {REFUSED[name]}"
    if name in SUPPLIED:
        return "Use a torch built with torch.distributed"
    return "Check the spelling; docs/from-apex.md says what of Apex works, and what replaces it"


def _refuse_attribute(module: str, name: str) -> Any:
    """What an alias module's ``__getattr__`` does (PEP 562)."""
    if name.startswith("__"):  # Python's own questions
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    refuse_missing(f"{module}.{name}", AttributeError)
    raise AttributeError(f"module {module!r} has no attribute {name!r} yet", name=name)


def _is_below_alias(name: str) -> bool:
    """Whether ``name`` is looked for in a module that is the alias's own."""
    parent = sys.modules.get(name.rpartition(".")[0])
    return isinstance(getattr(getattr(parent, "__spec__", None), "loader", None), AliasLoader)


def _is_available(name: str) -> bool:
    if f"{name}.".startswith(f"{NEEDS_DISTRIBUTED}."):
        return torch.distributed.is_available()
    return True


def _distributions_elsewhere() -> Iterator[Distribution]:
    context = DistributionFinder.Context(name=ROOT)
    for finder in other_finders():
        if hasattr(finder, "find_distributions"):
            yield from cast("DistributionFinder", finder).find_distributions(context)


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
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if module is not None and isinstance(loader, AliasLoader):
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


def _entries() -> list[str]:
    value = os.environ.get(_PATH, "")
    return value.split(os.pathsep) if value else []
