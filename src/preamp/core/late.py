# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a package that load when they are first asked for, so that importing it stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names(package: str, **modules: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` (PEP 562) of a package or module from names' modules.

    Each is a relative import without its first dot; an empty one says that the name is a module.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(f".{modules[name] or name}", package)
        value = getattr(module, name) if modules[name] else module
        setattr(sys.modules[package], name, value)
        return value

    return load
