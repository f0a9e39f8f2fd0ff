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
    """The backward of a ``scale_loss`` block.

    Attributes:
        note: What is found in its gradients.
        loss: As given, unscaled.
    """

    note: GradientNote
    loss: torch.Tensor

    @property
    def sessions(self) -> Sequence[OptimizerSession]:
        """Of the block's optimizers."""
        ...


OnBackward = Callable[[Backward], None]
OnLoss = Callable[[torch.Tensor], None]
OnGradients = Callable[[Backward, bool], None]
OnNorm = Callable[[OptimizerSession, torch.Tensor], None]
OnUpdate = Callable[[OptimizerSession, bool], None]
OnSession = Callable[[OptimizerSession], None]


@dataclass(slots=True, eq=False)
class Events:
    """Who is called when.

    Attributes:
        block_begins: A ``scale_loss`` block was entered; nothing was changed yet.
        loss_scaled: With what the block yields.
        gradients_made: The backward has ended and its gradients are still scaled; whether they
            will be left so. May refuse.
        block_over: The gradients are unscaled.
        norm_taken: With the L2 norm of all unscaled gradients of an optimizer.
        update_begins: The weights are about to change; whether a closure may make new gradients.
        step_over: A step was taken or not, or the device decides.
        gradients_dropped: By ``zero_grad``.
    """

    block_begins: list[OnBackward] = field(default_factory=list[OnBackward])
    loss_scaled: list[OnLoss] = field(default_factory=list[OnLoss])
    gradients_made: list[OnGradients] = field(default_factory=list[OnGradients])
    block_over: list[OnBackward] = field(default_factory=list[OnBackward])
    norm_taken: list[OnNorm] = field(default_factory=list[OnNorm])
    update_begins: list[OnUpdate] = field(default_factory=list[OnUpdate])
    step_over: list[OnSession] = field(default_factory=list[OnSession])
    gradients_dropped: list[OnSession] = field(default_factory=list[OnSession])
