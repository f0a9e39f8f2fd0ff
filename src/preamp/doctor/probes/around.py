# SPDX-License-Identifier: BSD-3-Clause
"""How probes are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from preamp.casting.patches import PATCHES, Rank
from preamp.core.undo import UndoStack
from preamp.doctor.watch import Watch

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


def telling(
    watch: Watch, event: str, *, which: int = 0, late: bool = False, of_result: bool = False
) -> Around:
    """What tells detectors of ``event`` and of a call's argument number ``which``.

    It does so before the call, or, ``late``, once it has returned; ``of_result`` instead of what it
    has returned.
    """

    def tell(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_told = watch.is_active and (of_result or len(args) > which)
        if is_told and not (late or of_result):
            watch.tell(event, args[which])
        result = function(*args, **kwargs)
        if is_told and (late or of_result):
            watch.tell(event, result if of_result else args[which])
        return result

    return tell
