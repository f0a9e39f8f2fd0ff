# SPDX-License-Identifier: BSD-3-Clause
"""Let torch's optimizers choose their multi-tensor path for parameters of our own class."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch


class ForeachType:
    """Names a parameter class to torch's optimizers for as long as it is held.

    With ``foreach=None`` they take the multi-tensor path only if every parameter's exact type is
    on a list; a subclass would silently get the one-tensor-at-a-time loop, several times slower
    on a GPU. The list is private, and extending it is what DTensor does too.
    """

    def __init__(self, cls: type[torch.Tensor]) -> None:
        self._cls = cls

    def hold(self) -> None:
        """Put the class on the list, if nobody has yet."""
        types = _supported_types()
        if types is not None:
            _HOLDERS.setdefault(self._cls, set()).add(self)
            if self._cls not in types:
                types.append(self._cls)

    def remove(self) -> None:
        """Take the class off the list again, after its last holder; may be called twice."""
        types, holders = _supported_types(), _HOLDERS.get(self._cls)
        if types is None or holders is None:  # never held
            return
        holders.discard(self)
        if not holders:
            if self._cls in types:
                types.remove(self._cls)
            _HOLDERS.pop(self._cls, None)


_HOLDERS: dict[type, set[ForeachType]] = {}


def _supported_types() -> list[type] | None:
    """Torch's list, or ``None`` where this version has none."""
    # torch.optim deletes its attribute of this name, so only the import system finds the module.
    module = importlib.import_module("torch.optim.optimizer")
    types: Any = getattr(module, "_foreach_supported_types", None)
    return cast("list[type]", types) if isinstance(types, list) else None
