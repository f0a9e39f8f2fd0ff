# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a package that load when they are first asked for, so that importing it stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` (PEP 562) of a package from its names' own modules.

    Each is a path below the package; an empty one says that the name is a module.
    ``dir`` shows these names and those in ``__all__``, whether they have been loaded or not.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        setattr(sys.modules[package], name, value)
        return value

    def public() -> list[str]:
        own = vars(sys.modules[package])
        of_python = (name for name in own if name.startswith("__") and name.endswith("__"))
        return sorted({*of_python, *own.get("__all__", ()), *modules})

    return load, public
