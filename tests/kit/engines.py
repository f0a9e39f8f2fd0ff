# SPDX-License-Identifier: BSD-3-Clause
"""Engines that tests leave open: noted as they are made, and closed after the test.

One that stays would cast functions in the tests that come after it.
"""

import weakref
from typing import Any

from preamp.engine import Engine

_MADE: list[weakref.ref[Engine]] = []


def note_engines() -> None:
    """Note each engine that is made in this process from now on."""
    make = Engine.__init__

    def make_and_note(self: Engine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _MADE.append(weakref.ref(self))

    Engine.__init__ = make_and_note  # type: ignore[method-assign]


def close_engines() -> None:
    """Close what is open, the latest first."""
    while _MADE:
        if (engine := _MADE.pop()()) is not None:
            engine.close()
