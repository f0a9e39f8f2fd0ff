# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._initialize.applier``, which scripts call to move or cast nested inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preamp.core.pytree import map_leaves


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``fn`` applied to every tensor in it.

    Args:
        value: A tensor, a container or anything else; containers keep their type.
        fn: Called with each tensor, and with each object that has a ``to`` method.

    Returns:
        The mapped value; see `preamp.core.pytree.map_leaves`.
    """
    return map_leaves(fn, value)
