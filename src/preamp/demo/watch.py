# SPDX-License-Identifier: BSD-3-Clause
"""How a run tells the outside how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from preamp.demo.records import LevelResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One finished step.

    Attributes:
        level: The opt level in training.
        step: Steps done, this one included.
        loss: Training loss in bits per byte.
        loss_scale: The scale of the next step.
        tokens_per_second: Speed of this step.
    """

    level: str
    step: int
    loss: float
    loss_scale: float
    tokens_per_second: float


class Watcher(Protocol):
    """Someone who wants to know; a progress display, or a test."""

    def level_started(self, level: str) -> None:
        """Tell that an opt level begins."""
        ...

    def step_done(self, progress: Progress) -> None:
        """Tell that a step is over."""
        ...

    def level_done(self, result: LevelResult) -> None:
        """Tell that an opt level is over, finished or not."""
        ...


class Unwatched:
    """Nobody wants to know."""

    def level_started(self, level: str) -> None:
        """Do nothing."""

    def step_done(self, progress: Progress) -> None:
        """Do nothing."""

    def level_done(self, result: LevelResult) -> None:
        """Do nothing."""
