# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a package that load when they are first asked for, so that importing it stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def submodules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Make the ``__getattr__`` of a package (PEP 562) that loads submodules by name.

    Python sets the attribute once the submodule has loaded, so it is asked once.
    """

    def load(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise _missing(package, name)

    return load


def names(package: str, **modules: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package (PEP 562) from the module of each name.

    It sets the attribute and so is asked once.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise _missing(package, name)
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def _missing(package: str, name: str) -> AttributeError:
    return AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
