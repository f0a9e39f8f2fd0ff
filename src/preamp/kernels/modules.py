# SPDX-License-Identifier: BSD-3-Clause
"""What torch keeps about modules, private to it."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import nn


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that are not persistent; scripted modules tell none."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))


def recurrent_functions() -> ModuleType:
    """The private module, the only one, on which recurrent layers and cells find ``lstm`` etc."""
    return importlib.import_module("torch._VF")
