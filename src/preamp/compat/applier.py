# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._initialize.applier``, which scripts call to move or cast nested inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preamp.core.pytree import map_leaves


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``fn`` applied to every tensor in it, and to each object with ``to``.

    Containers keep their type; see `preamp.core.pytree.map_leaves`.
    """
    return map_leaves(fn, value)
