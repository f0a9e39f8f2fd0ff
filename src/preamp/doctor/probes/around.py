# SPDX-License-Identifier: BSD-3-Clause
"""How probes are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from preamp.casting.patches import PATCHES, Rank
from preamp.core.undo import UndoStack

Around = Callable[..., Any]


def around(owner: Any, name: str, wrap: Around, undo: UndoStack) -> None:
    """Put ``wrap(function, *args, **kwargs)`` around ``owner.name``; ``undo`` takes it off again.

    Nothing happens if the owner has no such attribute, since torch's versions differ. ``wrap`` must
    call ``function`` once, with what it was given, and return what that returned.
    """
    if not hasattr(owner, name):
        return

    def layer(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            return wrap(function, *args, **kwargs)

        return observed

    PATCHES.add(owner, name, Rank.PROBE, layer, undo)
