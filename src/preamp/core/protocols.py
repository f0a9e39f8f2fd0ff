# SPDX-License-Identifier: BSD-3-Clause
"""What lower rooms ask of higher ones, as types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class MasterLookup(Protocol):
    """Finds the float32 master of a half parameter."""

    @property
    def has_masters(self) -> bool:
        """Whether there is any master at all."""
        ...

    def load_exact(self, half: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """Set the master of ``half``; returns what to round into it, or ``None``."""
        ...

    def exact_value(self, half: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 value of ``half`` as a checkpoint should hold it, or ``None``."""
        ...


class Span(Protocol):
    """Consecutive elements of a tensor, in the order of its memory."""

    @property
    def start(self) -> int:
        """The first."""
        ...

    @property
    def stop(self) -> int:
        """One after the last."""
        ...


class StepSharing(Protocol):
    """Lets ranks share the work of an optimizer's step."""

    def begin(self, *, has_closure: bool) -> None:
        """The update begins; called again where a step calls the step of a base class."""
        ...

    def end(self) -> None:
        """The update is over, or has failed. Calls nobody else."""
        ...

    def exchange(self) -> None:
        """Half weights are written: get the other ranks' parts. All ranks call this."""
        ...

    def shared(self) -> Iterable[tuple[torch.Tensor, torch.Tensor, Span]]:
        """What is shared: what the optimizer has, the weight, and this rank's part of it."""
        ...
