# SPDX-License-Identifier: BSD-3-Clause
"""Submodules that load when they are first asked for, so that importing the package stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


def submodules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Make the ``__getattr__`` of a package (PEP 562).

    Args:
        package: Its name.
        names: Of the submodules that ``package.name`` loads.

    Returns:
        The function. Python sets the attribute once the submodule has loaded, so it is asked once.
    """

    def load(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    return load
