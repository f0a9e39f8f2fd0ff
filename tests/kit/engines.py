# SPDX-License-Identifier: BSD-3-Clause
"""Engines that tests leave open: noted as they are made, and closed after the test.

One that stays would cast functions in the tests that come after it.
"""

import functools
import weakref
from typing import Any

from preamp.engine import Engine

_MADE: list[weakref.ref[Engine]] = []


def note_engines() -> None:
    """Note each engine that something leads to in this process from now on."""
    be_found = Engine.be_found_from

    @functools.wraps(be_found)
    def be_found_and_noted(self: Engine, thing: Any) -> None:
        be_found(self, thing)
        _MADE.append(weakref.ref(self))

    Engine.be_found_from = be_found_and_noted  # type: ignore[method-assign]


def close_engines() -> None:
    """Close what is open, the latest first."""
    while _MADE:
        if (engine := _MADE.pop()()) is not None:
            engine.close()
