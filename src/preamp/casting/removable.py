# SPDX-License-Identifier: BSD-3-Clause
"""The handle that everything this room switches on returns."""

from __future__ import annotations

from collections.abc import Callable


class UndoOnce:
    """A ``Removable`` of ``preamp.core.undo`` whose callback runs on the first ``remove`` only."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        """Remember what to run."""
        self._callback: Callable[[], None] | None = callback

    def remove(self) -> None:
        """Run the callback once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
