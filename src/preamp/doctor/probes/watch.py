# SPDX-License-Identifier: BSD-3-Clause
"""What probes tell, and how they are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from preamp.casting.patches import PATCHES, Rank
from preamp.core.undo import UndoStack
from preamp.doctor.seen import Seen

Around = Callable[..., Any]
T = TypeVar("T")


class Watch(Protocol):
    """What probes need of the examination."""

    seen: Seen

    @property
    def is_active(self) -> bool:
        """Whether this process is the one that is examined; a fork is not."""
        ...

    def tell(self, event: str, *values: Any) -> None:
        """Hand an event to the detectors; never raises because of them."""
        ...

    @property
    def is_looking(self) -> bool:
        """Whether the doctor itself is computing, and not the script."""
        ...

    def attempt(self, look: Callable[..., T], *values: Any) -> T | None:
        """Return ``look(*values)``; ``None`` with a note if that failed."""
        ...

    def step_taken(self) -> None:
        """Count an optimizer step, and raise if it was the last one wanted."""
        ...


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

    undo.hold(PATCHES.add(owner, name, Rank.PROBE, layer))
