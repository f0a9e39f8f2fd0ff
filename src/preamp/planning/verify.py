# SPDX-License-Identifier: BSD-3-Clause
"""A few steps at a level on copies, and how far their losses are from float32's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import LossScaleError
from preamp.engine import scale_loss
from preamp.engine.initialize import create_engine
from preamp.planning.isolation import untouched_random
from preamp.planning.peak import LossFn
from preamp.policy import Policy

TOLERANCE = 0.05  # how far a loss may be from float32's, as a share of the first loss


@dataclass(frozen=True, slots=True)
class Verification:
    """A short training at a level.

    Attributes:
        losses: Before each step.
        deviation: The largest distance from float32's losses, as a share of the first one;
            infinite if a loss is not finite.
        skipped: Steps skipped because of overflow.
    """

    losses: tuple[float, ...]
    deviation: float
    skipped: int

    @property
    def holds(self) -> bool:
        """Whether the losses follow float32's, and not because every step was skipped."""
        return self.deviation <= TOLERANCE and self.skipped < len(self.losses)


def train_at(
    copies: tuple[nn.Module, torch.optim.Optimizer],
    policy: Policy,
    loss_fn: LossFn,
    batch: Any,
    *,
    steps: int,
    scale: float = 1.0,
) -> tuple[tuple[float, ...], int]:
    """Train a float32 model and its optimizer at a level, from the random state of now.

    Both are mutated; the random state is put back. ``scale`` is the loss scale to start with where
    the level's is dynamic, and to stay with at O3. Returns the losses before each step, fewer where
    the loss scaler gives up, and the number of skipped steps.
    """
    model, optimizer = copies
    losses: list[float] = []
    engine = create_engine([model], [optimizer], policy)
    try:
        if policy.half_dtype is torch.float16:
            engine.scaler(0).set_scale(scale)
        with untouched_random():
            for _ in range(steps):
                loss = loss_fn(model, batch)
                losses.append(float(loss.item()))
                with scale_loss(loss, optimizer) as scaled:
                    cast("Any", scaled).backward()
                optimizer.step()
                optimizer.zero_grad()
    except LossScaleError:
        losses.append(math.nan)
    finally:
        engine.close()
    return tuple(losses), engine.steps_skipped


def compare(losses: Sequence[float], skipped: int, expected: Sequence[float]) -> Verification:
    """Measure a level's losses against float32's, ``expected``, from the same start."""
    unit = abs(expected[0]) or 1.0
    distances = [abs(a - b) / unit for a, b in zip(losses, expected, strict=False)]
    is_finite = len(losses) == len(expected) and all(map(math.isfinite, losses))
    return Verification(tuple(losses), max(distances) if is_finite else math.inf, skipped)
