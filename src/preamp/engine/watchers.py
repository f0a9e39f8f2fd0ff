# SPDX-License-Identifier: BSD-3-Clause
"""What an engine asks of those who watch it; the room ``watch`` has them, and says so here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from torch import nn

from preamp.engine.core import EngineCore
from preamp.engine.overflow import GradientNote
from preamp.engine.recording import Recording
from preamp.engine.session import OptimizerSession

if TYPE_CHECKING:
    from preamp.numerics import History


class Tracer(Protocol):
    """Watches the modules of an engine's models while it is armed."""

    def arm(self, *, stays: bool = False, is_first: bool = False) -> None:
        """Watch until an overflow, or for good; ``is_first`` if there was no backward yet."""

    def release(self, model: nn.Module) -> None:
        """Watch ``model`` no longer, now or later."""

    def disarm(self) -> None:
        """Watch nothing any more."""


class Recorder(Protocol):
    """Makes the records of an engine's history."""

    @property
    def history(self) -> History:
        """The records."""
        ...

    def start(self, engine: EngineCore) -> None:
        """The run of ``engine`` begins, or goes on with the file of an earlier one."""

    def measure(self, sessions: Iterable[OptimizerSession], note: GradientNote) -> None:
        """A backward has left scaled gradients. Does not synchronise."""

    def flush(self, *, wait: bool = False) -> None:
        """Make the records that can be made; to ``wait`` for their numbers synchronises."""

    def resumed(self) -> None:
        """The counters were set to a checkpoint's. Synchronises."""

    def close(self) -> None:
        """Make all records and close the history. Synchronises."""


make_watchers: Callable[[EngineCore, Recording], tuple[Tracer, Recorder]]
"""Set as the package is imported, by ``preamp.watch.makers``: this room imports none of it."""
