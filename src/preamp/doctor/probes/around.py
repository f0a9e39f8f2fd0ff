# SPDX-License-Identifier: BSD-3-Clause
"""How probes are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from preamp.casting.patches import PATCHES, Rank
from preamp.core.undo import UndoStack
from preamp.doctor.watch import Watch

Function = Callable[..., Any]


def around(watch: Watch, owner: Any, name: str, wrap: Function, undo: UndoStack) -> None:
    """Put ``wrap(function, *args, **kwargs)`` around ``owner.name``; ``undo`` takes it off again.

    Nothing happens if the owner has no such attribute, since torch's versions differ. ``wrap`` must
    call ``function`` once, with what it was given, and return what that returned. It is passed by
    while ``watch`` is not active.
    """
    if not hasattr(owner, name):
        return

    def layer(function: Function) -> Function:
        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not watch.is_active:
                return function(*args, **kwargs)
            return wrap(function, *args, **kwargs)

        return observed

    PATCHES.add(owner, name, Rank.PROBE, layer, undo)


def telling(watch: Watch, event: str, *, late: bool = False, of_result: bool = False) -> Function:
    """What tells detectors of ``event`` and of a call's first argument.

    It does so before the call, or, ``late``, once it has returned; ``of_result`` instead of what it
    has returned.
    """

    def tell(function: Function, *args: Any, **kwargs: Any) -> Any:
        is_told = of_result or bool(args)
        if is_told and not (late or of_result):
            watch.tell(event, args[0])
        result = function(*args, **kwargs)
        if is_told and (late or of_result):
            watch.tell(event, result if of_result else args[0])
        return result

    return tell
