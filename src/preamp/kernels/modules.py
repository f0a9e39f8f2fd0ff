# SPDX-License-Identifier: BSD-3-Clause
"""What torch keeps about modules, private to it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import cast

from torch import nn


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that are not persistent; scripted modules tell none."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))


def recurrent_functions() -> ModuleType:
    """The private module, the only one, on which recurrent layers and cells find ``lstm`` etc."""
    return importlib.import_module("torch._VF")


def call_hooks_after_interrupts(is_on: bool) -> None:
    """Let torch call ``always_call`` hooks of modules after a ``KeyboardInterrupt`` too, or not.

    It looks for ``Exception`` where modules are called. A global of that name hides Python's own
    from the file, so it is there during forwards that need it only.
    """
    names = cast("dict[str, object]", vars(nn.modules.module))
    if is_on:
        names["Exception"] = BaseException
    else:
        names.pop("Exception", None)
