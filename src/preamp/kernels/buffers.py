# SPDX-License-Identifier: BSD-3-Clause
"""What torch keeps about a module's buffers, private to it."""

from __future__ import annotations

from torch import nn


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that are not persistent; scripted modules tell none."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))
