# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a package that load when they are first asked for, so that importing it stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names(package: str, **modules: str) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` (PEP 562) from names' modules; none is for submodules."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        setattr(sys.modules[package], name, value)
        return value

    return load
