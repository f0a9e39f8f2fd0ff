# SPDX-License-Identifier: BSD-3-Clause
"""Some steps at a level on copies, and how far losses and weights are from float32's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import LossScaleError
from preamp.core.randomness import untouched_random
from preamp.engine import scale_loss
from preamp.engine.initialize import create_engine
from preamp.kernels.vectors import norm
from preamp.planning.isolation import Task
from preamp.planning.ranges import is_measurable
from preamp.policy import Policy

TOLERANCE = 0.05  # how far a loss may be from float32's, as a share of the largest of those
NEAR = 2.0  # up to so many times the tolerance a level is near the limit, not beyond it
SUNK = 0.75  # of float32's fall of the loss, the part that a level has to reach
FOLLOWED = 2 / 3  # of float32's way, the part that the weights have to go
STALLING = 0.9  # the same where updates round to nothing as it was forecast, and shrink
_MOVED = 0.5  # of float32's way, the part below which a parameter counts as frozen
_VISIBLE = 0.1  # share of its largest value that a loss has to fall to be compared by that
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # torch's names for averages of squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A short training at a level, beside the same one in float32.

    Attributes:
        losses: Before each step.
        deviation: The largest distance from float32's losses, as a share of the largest of those;
            infinite if a loss or a weight is not finite. Skipped steps are left out.
        skipped: Steps skipped because of overflow.
        sunk: How far the loss fell, as a share of float32's fall in as many steps; ``None`` where
            both are too small to be compared.
        frozen: Parameters that moved less than half as far as in float32.
        followed: Movement along float32's, as a share of it, over all parameters.
    """

    losses: tuple[float, ...]
    deviation: float
    skipped: int
    sunk: float | None = None
    frozen: tuple[str, ...] = ()
    followed: float = 1.0

    @property
    def is_near(self) -> bool:
        """Whether the losses are further away than they should be, and yet good enough."""
        return self.deviation > TOLERANCE and self.holds

    @property
    def holds(self) -> bool:
        """Whether the losses follow float32's, and not because every step was skipped."""
        if self.skipped == len(self.losses) or not math.isfinite(self.deviation):
            return False
        if self.sunk is not None:
            return self.sunk >= SUNK
        return self.deviation <= NEAR * TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a short training left behind."""

    losses: tuple[float, ...]  # before each step; fewer where the loss scaler gave up
    skipped: tuple[int, ...]  # steps, counted from 0
    moved: Mapping[str, torch.Tensor]  # by parameter, from the first weights to the last, float32
    is_finite: bool  # whether the weights are
    has_squares: bool  # whether the optimizer divides by the root of averages of squares
    has_half_squares: bool  # whether it keeps these in half


def train_at(task: Task, policy: Policy, *, steps: int, scale: float = 1.0) -> Trained:
    """Train a copy in float32 at a level, from the random state of now.

    All of the task is mutated; the random state is put back. ``scale`` is the loss scale to start
    with where the level's is dynamic, and to stay with at O3. Synchronises.
    """
    model, optimizer = task.model, task.optimizer
    losses, skipped, squares = list[float](), list[int](), list[torch.Tensor]()
    weights = {n: param for n, param in model.named_parameters() if is_measurable(param)}
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    engine = create_engine([model], [optimizer], policy)
    try:
        if policy.half_dtype is torch.float16:
            engine.scaler(0).set_scale(scale)
        for name, weight in weights.items():
            if is_half(weight) and not policy.master_weights:
                start[name] = start[name].to(weight.dtype).float()  # where it really starts
        with untouched_random():
            for step in range(steps):
                before = engine.steps_skipped
                loss = task.loss_fn(model, task.batch)
                losses.append(float(loss.item()))
                with scale_loss(loss, optimizer) as scaled:
                    cast("Any", scaled).backward()
                optimizer.step()
                optimizer.zero_grad()
                skipped += [step] * (engine.steps_skipped > before)
        states: list[dict[str, Any]] = list(cast("Any", optimizer.state).values())
        kept = [state.get(key) for state in states for key in _SQUARES]
        squares = [value for value in kept if isinstance(value, torch.Tensor)]
    except LossScaleError:
        losses.append(math.nan)
    finally:
        engine.close()
    return Trained(
        losses=tuple(losses),
        skipped=tuple(skipped),
        moved={name: weights[name].detach() - before for name, before in start.items()},
        is_finite=all(bool(torch.isfinite(weight).all()) for weight in weights.values()),
        has_squares=bool(squares),
        has_half_squares=any(map(is_half, squares)),
    )


def compare(level: Trained, expected: Trained, noise: Collection[str] = ()) -> Verification:
    """Measure a training at a level against float32's from the same start.

    ``noise`` names parameters whose gradients are rounding error, which no level has to follow.
    """
    skipped, losses = len(level.skipped), level.losses
    is_whole = len(losses) == len(expected.losses) and all(map(math.isfinite, losses))
    if not (is_whole and level.is_finite):
        return Verification(losses=losses, deviation=math.inf, skipped=skipped)
    # A skipped step is a delay, which a longer training does not feel.
    taken = [loss for step, loss in enumerate(losses) if step not in level.skipped] or losses
    wanted = expected.losses[: len(taken)]
    unit = max(map(abs, expected.losses)) or 1.0
    fall, own = wanted[0] - wanted[-1], taken[0] - taken[-1]
    share = len(taken) / len(losses)
    moves = [(n, level.moved[n], way) for n, way in expected.moved.items() if n not in noise]
    return Verification(
        losses=losses,
        deviation=max(abs(a - b) / unit for a, b in zip(taken, wanted, strict=True)),
        skipped=skipped,
        sunk=own / max(fall, _VISIBLE * unit) if max(fall, own) > _VISIBLE * unit else None,
        frozen=tuple(n for n, a, b in moves if bool(norm(a) < _MOVED * share * norm(b))),
        followed=_followed([(a, b) for _, a, b in moves]) / share,
    )


def _followed(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Projection of one movement on the other, as a share of that one's length."""
    along = sum(float((a * b).sum().item()) for a, b in moves)
    length = sum(float(b.square().sum().item()) for _, b in moves)
    return along / length if length else 1.0
