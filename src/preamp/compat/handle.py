# SPDX-License-Identifier: BSD-3-Clause
"""``amp._amp_state.handle``, and what becomes of ``amp.init``, Apex's interface of 2018."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from preamp.casting import disable_casts, is_any_casting
from preamp.core.errors import unavailable

_LINES = """
- handle = amp.init(enabled=...)
- optimizer = handle.wrap_optimizer(optimizer)
+ model, optimizer = amp.initialize(model, optimizer, opt_level="O1", enabled=...)
- with optimizer.scale_loss(loss) as scaled_loss:
+ with amp.scale_loss(loss, optimizer) as scaled_loss:
"""


class AmpHandle:
    """Function casts that are on, of an engine that ``amp.initialize`` made at O1 or O4."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """Casts are on until ``stop`` is called, which may be called again."""
        self._stop = stop
        self._is_on = True

    def is_active(self) -> bool:
        """Whether the handle is on and functions are cast here."""
        return self._is_on and is_any_casting()

    def deactivate(self) -> None:
        """Take all casts back, the latest first."""
        self._is_on = False
        self._stop()

    _deactivate = deactivate  # Apex's name

    def _disable_casts(self) -> AbstractContextManager[None]:
        """Return a block without casts; nests, and ends properly on exceptions."""
        return disable_casts()

    def _clear_cache(self) -> None:
        """Do nothing: scripts call it after they change weights, which no cast outlives here."""


def init(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise `PreampUnavailableError`, which says what to write in place of that interface."""
    del args, kwargs
    raise unavailable(
        "amp.init was called, as scripts of 2018 do",
        "Functions are cast, and losses scaled, for what amp.initialize has",
        f"Edit these lines:{_LINES}  with num_losses and loss_id where there are several losses",
    )
