# SPDX-License-Identifier: BSD-3-Clause
"""Some steps at a level on copies, and whether its losses stay near float32's.

The steps are cut into quarters, and in each of them the mean of the losses may differ from the mean
of float32's by at most

    SHARE * reach + min(TWINS * spread, 2 * SHARE * largest)

- Every quarter, since the first one begins at the same weights: a loss that is another one there is
  computed wrongly. Means, since single losses scatter.
- ``reach`` is how far float32's losses went, from the lowest to the highest. How far a level's own
  loss fell says nothing: one that begins at a hundred times float32's falls further than that one
  ever can, and still ends far above it.
- ``spread`` is how far float32 is from itself: the largest distance, at any step, from a second
  float32 training whose first weights differ by a rounding to bfloat16, and that draws other random
  numbers. It covers steps too small to be seen in the loss, losses that scatter from batch to
  batch, and trainings that any rounding sends elsewhere, as those of adversaries. It is at least
  what rounding the largest loss to bfloat16 takes from it.
- ``largest`` is float32's largest loss. Where float32 is further from itself than a part of that,
  losses speak for nothing, and least for a level.

So what is near is never further away than a fifth of the largest loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import LossScaleError
from preamp.core.randomness import untouched_random
from preamp.engine import scale_loss
from preamp.engine.initialize import create_engine
from preamp.kernels.vectors import norm
from preamp.planning.isolation import Task
from preamp.planning.ranges import check_finite, is_measurable, nudge
from preamp.policy import OPT_LEVELS, Policy

SHARE = 0.05  # of the way that float32's losses went, the part that a level's may be away from them
TWINS = 2.0  # how many times as far from float32 as a rounded float32 training a level may be
_PARTS = 4  # into which the steps are cut
_ROUNDING = 2.0**-9  # of a number to bfloat16, relative to it
FOLLOWED = 2 / 3  # of float32's way, the part that the weights have to go
STALLING = 0.9  # the same where updates round to nothing as it was forecast, and shrink
_MOVED = 0.5  # of float32's way, the part below which a parameter counts as frozen
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # torch's names for averages of squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A short training at a level, beside the same one in float32.

    Attributes:
        losses: Before each step.
        skipped: Steps skipped because of overflow.
        reached: The mean loss in the quarter of the steps that is furthest from float32's; nan if a
            loss or a weight is not finite. Skipped steps are left out.
        expected: The same of float32.
        allowed: How far from ``expected`` is near.
        frozen: Parameters that moved less than half as far as in float32.
        followed: Movement along float32's, as a share of it, over all parameters.
    """

    losses: tuple[float, ...]
    skipped: int
    reached: float = math.nan
    expected: float = math.nan
    allowed: float = 0.0
    frozen: tuple[str, ...] = ()
    followed: float = 1.0

    @property
    def distance(self) -> float:
        """How far losses are from float32's."""
        return abs(self.reached - self.expected)

    @property
    def holds(self) -> bool:
        """Whether the losses stay near float32's, and not because every step was skipped."""
        return self.skipped < len(self.losses) and self.distance <= self.allowed


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
        # By chance, and in bfloat16's range, they are rounded without harm.
        has_half_squares=policy.storage.moments == "float32" and any(map(is_half, squares)),
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What float32 does, and how far it is from itself."""

    trained: Trained
    spread: float  # the largest distance of two trainings that differ by a rounding to bfloat16
    noise: frozenset[str] = frozenset()  # parameters whose gradients are rounding error


def train_expected(task: Task, steps: int, noise: frozenset[str]) -> Expected:
    """Train two copies in float32, one of them from weights that differ by a rounding.

    Nothing is mutated, and the random state is put back. Raises ``ValueError`` if a loss or a
    weight is not finite. Synchronises.
    """
    policy = OPT_LEVELS["O0"]
    trained, twin = train_at(task.copy(), policy, steps=steps), task.copy()
    for loss in trained.losses if trained.is_finite else (math.nan,):
        check_finite(loss)
    with untouched_random():
        nudge(twin.model, _ROUNDING)  # the random numbers of its steps are other ones by this
        losses = train_at(twin, policy, steps=steps).losses
    apart = [abs(a - b) for a, b in zip(trained.losses, losses, strict=True)]
    spread = max(apart) if all(map(math.isfinite, apart)) else math.inf
    return Expected(trained, spread, noise)


def compare(level: Trained, float32: Expected) -> Verification:
    """Measure a training at a level against float32's from the same start."""
    skipped, losses, expected = len(level.skipped), level.losses, float32.trained
    is_whole = len(losses) == len(expected.losses) and all(map(math.isfinite, losses))
    if not (is_whole and level.is_finite):
        return Verification(losses=losses, skipped=skipped)
    # A skipped step is a delay, which a longer training does not feel.
    taken = [loss for step, loss in enumerate(losses) if step not in level.skipped] or losses
    wanted = expected.losses[: len(taken)]
    size = -(-len(taken) // _PARTS)
    means = [
        (fmean(taken[at : at + size]), fmean(wanted[at : at + size]))
        for at in range(0, len(taken), size)
    ]
    reached, at_float32 = max(means, key=lambda pair: abs(pair[0] - pair[1]))
    largest = max(map(abs, wanted))
    spread = max(float32.spread, _ROUNDING * largest)
    allowed = SHARE * (max(wanted) - min(wanted)) + min(TWINS * spread, 2 * SHARE * largest)
    share = len(taken) / len(losses)
    moves = [(n, level.moved[n], w) for n, w in expected.moved.items() if n not in float32.noise]
    return Verification(
        losses=losses,
        skipped=skipped,
        reached=reached,
        expected=at_float32,
        allowed=allowed,
        frozen=tuple(n for n, a, b in moves if bool(norm(a) < _MOVED * share * norm(b))),
        followed=_followed([(a, b) for _, a, b in moves]) / share,
    )


def _followed(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Projection of one movement on the other, as a share of that one's length."""
    along = sum(float((a * b).sum().item()) for a, b in moves)
    length = sum(float(b.square().sum().item()) for _, b in moves)
    return along / length if length else 1.0
