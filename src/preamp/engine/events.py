# SPDX-License-Identifier: BSD-3-Clause
"""What an engine tells those who listen.

Recording, statistics and tracing subscribe where they were asked for; otherwise the lists are
empty and a step knows nothing of them. Listeners are called in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from preamp.engine.overflow import GradientNote
from preamp.engine.session import OptimizerSession


class Backward(Protocol):
    """The backward of a ``scale_loss`` block."""

    note: GradientNote  # what is found in its gradients
    loss: torch.Tensor  # as given, unscaled

    @property
    def sessions(self) -> Sequence[OptimizerSession]:
        """Of the block's optimizers."""
        ...


OnBackward = Callable[[Backward], None]
OnLoss = Callable[[torch.Tensor], None]
OnNorm = Callable[[OptimizerSession, torch.Tensor], None]
OnUpdate = Callable[[OptimizerSession, bool], None]
OnSession = Callable[[OptimizerSession], None]


@dataclass(slots=True, eq=False)
class Events:
    """Who is called when."""

    # A ``scale_loss`` block was entered; nothing was changed yet
    block_begins: list[OnBackward] = field(default_factory=list[OnBackward])
    loss_scaled: list[OnLoss] = field(default_factory=list[OnLoss])  # with what the block yields
    # The backward has ended and its gradients are still scaled. May refuse.
    gradients_made: list[OnBackward] = field(default_factory=list[OnBackward])
    # The gradients are unscaled
    block_over: list[OnBackward] = field(default_factory=list[OnBackward])
    # With the L2 norm of all unscaled gradients of an optimizer
    norm_taken: list[OnNorm] = field(default_factory=list[OnNorm])
    # The weights are about to change; whether a closure may make new gradients
    update_begins: list[OnUpdate] = field(default_factory=list[OnUpdate])
    # A step was taken or not, or the device decides
    step_over: list[OnSession] = field(default_factory=list[OnSession])
    gradients_dropped: list[OnSession] = field(default_factory=list[OnSession])  # by ``zero_grad``
